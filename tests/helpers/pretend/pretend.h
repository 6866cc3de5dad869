// An accelerator that is not there: a PrivateUse1 device whose memory and arithmetic are the host's.
//
// It has no speed, and of streams only the order of copies. What it has is a real device's rules: which tensors may meet in an operator, where the
// host reads or copies, on which device a collective runs. See __init__.py for what tests do with it.
#pragma once

#include <ATen/ATen.h>
#include <string>

namespace pretend {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Devices that this process sees (PRETEND_DEVICES, 8 by default), and the current one of this thread.
int device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);

// Count what the host does to the device. Throws if a test has forbidden it.
void note(const std::string& what);

// The tensor's own memory, as a tensor of the CPU.
at::Tensor as_cpu(const at::Tensor& tensor);

}  // namespace pretend
