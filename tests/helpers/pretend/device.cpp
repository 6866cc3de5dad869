// Memory, operators, devices, streams and events of the pretend accelerator.
#include "pretend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>  // and not torch/extension.h, which takes half as long again to compile
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace pretend {

using at::Tensor;
using c10::Device;

namespace {

constexpr int kMostDevices = 8;
thread_local c10::DeviceIndex the_current_device = 0;
thread_local c10::StreamId current_streams[kMostDevices] = {};

// A device, with an index, that this process sees.
Device checked(std::optional<Device> asked) {
  const Device device = asked && asked->has_index() ? *asked : Device(kType, the_current_device);
  TORCH_CHECK(device.index() < device_count(), "pretend: invalid device ordinal ", device);
  return device;
}

// ---- counters -----------------------------------------------------------------------------------------------

std::mutex guard;  // of all that follows
std::map<std::string, int64_t> counters;
std::set<std::string> forbidden;

// ---- memory -------------------------------------------------------------------------------------------------

std::atomic<int64_t> bytes_in_use{0};
std::atomic<int64_t> most_bytes_in_use{0};

// What stands behind a storage: a share in its memory, and its part in the count of the device's bytes.
//
// The memory lives as long as anything has a share in it, not as long as a storage: a storage may be resized, and with it
// get other memory, while gloo still works on the old one.
class Allocation {
 public:
  Allocation(std::shared_ptr<void> memory, int64_t bytes) : memory_(std::move(memory)), bytes_(bytes) {
    const int64_t now = bytes_in_use += bytes;
    int64_t most = most_bytes_in_use;
    while (most < now && !most_bytes_in_use.compare_exchange_weak(most, now)) {
    }
  }
  ~Allocation() { bytes_in_use -= bytes_; }
  static void release(void* allocation) { delete static_cast<Allocation*>(allocation); }

  // A share in the memory of a storage, whoever made it.
  static std::shared_ptr<void> memory_of(const c10::Storage& storage) {
    const auto& data = storage.data_ptr();
    if (data.get_deleter() == &release) return static_cast<Allocation*>(data.get_context())->memory_;
    return std::make_shared<c10::Storage>(storage);
  }

 private:
  std::shared_ptr<void> memory_;
  int64_t bytes_;
};

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const Device device(kType, the_current_device);
    if (bytes == 0) return {nullptr, device};
    std::shared_ptr<void> memory(c10::alloc_cpu(bytes), c10::free_cpu);
    // NaN, as fresh memory may be. Only the beginning of it: large buffers would take too long.
    std::memset(memory.get(), 0xFF, std::min<size_t>(bytes, size_t{1} << 16));
    void* data = memory.get();
    return {data, new Allocation(std::move(memory), static_cast<int64_t>(bytes)), &Allocation::release, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
DeviceAllocator device_allocator;

// Pinned memory is memory of the host that is listed here.
std::map<const char*, size_t> pinned;

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    bytes = std::max<size_t>(bytes, 1);
    void* data = c10::alloc_cpu(bytes);
    const std::lock_guard<std::mutex> lock(guard);
    pinned[static_cast<const char*>(data)] = bytes;
    return {data, data, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* data) {
    {
      const std::lock_guard<std::mutex> lock(guard);
      pinned.erase(static_cast<const char*>(data));
    }
    c10::free_cpu(data);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> lock(guard);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) return false;
  const auto& [begin, bytes] = *--after;
  return static_cast<const char*>(address) < begin + bytes;
}

// How many copies of each stream have come to an end by some point of a stream, or by an event.
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
using Clock = std::map<StreamKey, int64_t>;
std::map<StreamKey, Clock> clocks;

// Copies between host and device that the host has not waited for.
struct UnderWay {
  StreamKey stream;
  int64_t number;  // of its stream
  Tensor host;     // where to, or where from
  Tensor values;   // what arrives, or what was there
  bool to_host;
  const char* begin;  // on the device
  size_t bytes;
};
std::vector<UnderWay> copies_under_way;

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
StreamKey current_key(Device device) { return {device.index(), current_streams[device.index()]}; }

void merge(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) clock[stream] = std::max(clock[stream], number);
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  const Tensor one = a.contiguous(), two = b.contiguous();
  return one.nbytes() == 0 || std::memcmp(one.const_data_ptr(), two.const_data_ptr(), one.nbytes()) == 0;
}

// Those that are over by some clock (all, without one), or some of them, are no longer under way.
std::vector<UnderWay> take_finished(
    const Clock* clock, const std::function<bool(const UnderWay&)>& wanted = [](const UnderWay&) { return true; }) {
  const std::lock_guard<std::mutex> lock(guard);
  std::vector<UnderWay> finished, others;
  for (auto& copy : copies_under_way) {
    const auto known = clock ? clock->find(copy.stream) : Clock::const_iterator{};
    const bool over = !clock || (known != clock->end() && copy.number <= known->second);
    (over && wanted(copy) ? finished : others).push_back(std::move(copy));
  }
  copies_under_way.swap(others);
  return finished;
}

void settle(const std::vector<UnderWay>& finished) {
  for (const auto& copy : finished) {
    if (copy.to_host) copy.host.copy_(copy.values);
    TORCH_CHECK(copy.to_host || same_bytes(copy.host, copy.values),
                "pretend: the host wrote to memory that was on its way to the device");
  }
}

Clock clock_of(StreamKey stream) {
  const std::lock_guard<std::mutex> lock(guard);
  return clocks[stream];
}

void begin_copy(StreamKey stream, const Tensor& on_device, Tensor host, Tensor values, bool to_host) {
  const std::lock_guard<std::mutex> lock(guard);
  const int64_t number = ++clocks[stream][stream];
  const auto* begin = static_cast<const char*>(on_device.const_data_ptr());
  copies_under_way.push_back({stream, number, std::move(host), std::move(values), to_host, begin, on_device.nbytes()});
}

// Throws if another stream is copying from the host to this memory, and the current one has not waited for it.
void check_arrived(const Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(guard);
  if (copies_under_way.empty() || tensor.numel() == 0) return;
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  const StreamKey current = current_key(tensor.device());
  for (const auto& copy : copies_under_way) {
    const bool meets = copy.begin < begin + tensor.nbytes() && begin < copy.begin + copy.bytes;
    if (copy.to_host || copy.stream == current || !meets) continue;
    TORCH_CHECK(copy.number <= clocks[current][copy.stream],
                "pretend: a stream uses what another one is still copying to the device");
  }
}

// A stream is about to copy from or to memory of the host: its own copies of that memory are over by then.
void settle_before(StreamKey stream, const Tensor& host) {
  const Clock clock = clock_of(stream);
  const auto* begin = static_cast<const char*>(host.const_data_ptr());
  settle(take_finished(&clock, [&](const UnderWay& copy) {
    const auto* other = static_cast<const char*>(copy.host.const_data_ptr());
    return other < begin + host.nbytes() && begin < other + copy.host.nbytes();
  }));
}

// The host has waited for what a stream has to do.
void wait_for(StreamKey stream) {
  const Clock clock = clock_of(stream);
  settle(take_finished(&clock));
}

// The same memory as a storage of another device.
c10::Storage shared_with(const c10::Storage& storage, Device device) {
  const bool of_device = device.type() == kType;
  c10::Allocator* allocator = of_device ? &device_allocator : c10::GetAllocator(c10::kCPU);
  const int64_t counted = of_device ? static_cast<int64_t>(storage.nbytes()) : 0;
  auto* share = new Allocation(Allocation::memory_of(storage), counted);
  c10::DataPtr data(storage.mutable_data(), share, &Allocation::release, device);
  return {c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(data), allocator, /*resizable=*/true};
}

// A tensor with the geometry of another one and a storage of its own.
Tensor with_storage(const Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// ---- operators ----------------------------------------------------------------------------------------------

// Tensors of one call of an operator: those of the device on their way to the CPU's kernel, and its results back.
class CallOnHost {
 public:
  explicit CallOnHost(std::string name) : name_(std::move(name)) {}

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kType) {
      has_host_operand_ |= tensor.device().is_cpu() && tensor.dim() > 0;  // a number may come from the host
      return tensor;
    }
    TORCH_CHECK(!device_ || *device_ == tensor.device(), mixed(), *device_, " and ", tensor.device());
    device_ = tensor.device();
    for (const auto& [ours, theirs] : tensors_) {
      if (ours.is_same(tensor)) return theirs;
    }
    tensors_.emplace_back(tensor, with_storage(tensor, host_storage(tensor.storage()), c10::DispatchKey::CPU));
    return tensors_.back().second;
  }

  // The device that new tensors are made on, after CUDA's check of the operands.
  void settle_device(std::optional<Device> asked) {
    // CUDA takes indices from the host as well.
    const bool indexes = name_.find("index") != std::string::npos;
    TORCH_CHECK(!device_ || !has_host_operand_ || indexes, mixed(), device_.value_or(Device(kType)), " and cpu");
    if (!device_) device_ = checked(asked);
  }

  Tensor to_device(const Tensor& result) const {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const auto& [ours, theirs] : tensors_) {
      if (theirs.is_same(result)) return ours;
    }
    for (const auto& [ours, theirs] : storages_) {
      if (theirs.is_alias_of(result.storage())) return with_storage(result, ours, c10::DispatchKey::PrivateUse1);
    }
    return with_storage(result, shared_with(result.storage(), *device_), c10::DispatchKey::PrivateUse1);
  }

  // The CPU's kernel may have resized what it was given: out= arguments, and resize_ itself.
  void take_over_sizes() const {
    for (const auto& [ours, theirs] : tensors_) {
      if (ours.sizes() != theirs.sizes() || ours.strides() != theirs.strides()) {
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
      }
    }
    for (const auto& [ours, theirs] : storages_) {
      if (ours.data() != theirs.data()) {
        auto moved = shared_with(theirs, ours.device());
        ours.set_nbytes(theirs.nbytes());
        ours.set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->mutable_data_ptr()));
      }
    }
  }

 private:
  std::string mixed() const {
    return c10::str("pretend: ", name_, ": Expected all tensors to be on the same device, but found at least two devices, ");
  }

  // One storage for all tensors that share one, so that views stay views.
  c10::Storage host_storage(const c10::Storage& storage) {
    for (const auto& [ours, theirs] : storages_) {
      if (ours.is_alias_of(storage)) return theirs;
    }
    storages_.emplace_back(storage, shared_with(storage, Device(c10::kCPU)));
    return storages_.back().second;
  }

  const std::string name_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;             // of the device, of the host
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // likewise
  std::optional<Device> device_;
  bool has_host_operand_ = false;
};

// Operators whose result has a shape or a value that the host must know.
const std::set<std::string> kReads = {
    "aten::equal",   "aten::is_nonzero",         "aten::masked_select", "aten::nonzero",
    "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
};

template <class Change>
void change_tensors(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    value = std::move(changed);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    value = std::move(changed);
  }
}

// Any operator without a kernel below: the CPU's, on the same memory.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (kReads.count(schema.name())) note("read");
  CallOnHost call(schema.name());
  std::optional<Device> asked;
  const size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; i++) {
    c10::IValue& argument = (*stack)[stack->size() - count + i];
    if (argument.isDevice()) {
      asked = argument.toDevice();
      argument = Device(c10::kCPU);
    }
    const auto* alias = schema.arguments()[i].alias_info();
    const bool is_viewed = alias && !alias->isWrite();  // and not read
    change_tensors(argument, [&](const Tensor& tensor) {
      if (!is_viewed && tensor.defined() && tensor.device().type() == kType) check_arrived(tensor);
      return call.to_host(tensor);
    });
  }
  call.settle_device(asked);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.take_over_sizes();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    change_tensors((*stack)[i], [&](const Tensor& tensor) { return call.to_device(tensor); });
  }
}

Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(checked(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard on(checked(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool from_device = source.device().type() == kType, to_device = target.device().type() == kType;
  if (from_device && to_device) {
    if (source.device() != target.device()) note("between devices");
  } else if (source.numel() > 0) {
    // CUDA does not wait for a copy to the host if it is told so, whatever memory it goes to; from the host it takes
    // pinned memory.
    const bool waits = !non_blocking || (to_device && !is_pinned(source.storage().data()));
    note(std::string(from_device ? "to host" : "to device") + (waits ? "" : ", not waiting"));
    const StreamKey stream = current_key(from_device ? source.device() : target.device());
    if (from_device && !waits) {
      const Tensor values = as_cpu(source).to(target.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
      settle_before(stream, target);
      // Who reads too early must not find the right values there.
      target.fill_(target.is_floating_point() ? at::Scalar(NAN) : at::Scalar(-1));
      begin_copy(stream, source, target, values.expand_as(target), /*to_host=*/true);
      return target;
    }
    if (waits) {
      wait_for(stream);
    } else {
      settle_before(stream, source);
      begin_copy(stream, target, source, source.clone(), /*to_host=*/false);
    }
  }
  auto into = to_device ? as_cpu(target) : target;
  into.copy_(from_device ? as_cpu(source) : source);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

at::Scalar read_value(const Tensor& tensor) {
  note("read");
  wait_for(current_key(tensor.device()));
  return at::_local_scalar_dense(as_cpu(tensor));
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes,
                    c10::SymIntArrayRef strides) {
  TORCH_CHECK(source.device() == self.device(), "pretend: set_ to a storage of ", source.device());
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  const auto known_sizes = C10_AS_INTARRAYREF_SLOW(sizes), known_strides = C10_AS_INTARRAYREF_SLOW(strides);
  if (known_strides.empty() && !known_sizes.empty()) {
    tensor->set_storage_offset(offset.expect_int());
    tensor->set_sizes_contiguous(known_sizes);
  } else {
    tensor->set_sizes_and_strides(known_sizes, known_strides, offset.expect_int());
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef({c10::SymInt(elements)}), {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(source.storage());
  tensor->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

void record_stream(Tensor&, at::Stream) {}

// param.data may move to this device, as it may to CUDA, so that Module.to keeps tied weights tied.
bool may_take_data_of(const Tensor&, const Tensor&) { return true; }

// Attention in plain tensor operations.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", read_value);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record_stream);
  library.impl("_has_compatible_shallow_copy_type", may_take_data_of);
  library.impl("_fused_sdp_choice", choose_attention);
  // torch composes it of other operators for a backend without a kernel, which rounds otherwise than the CPU's.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// ---- devices, streams, events: nothing runs late but copies between host and device ------------------------------

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return Device(kType, the_current_device); }
  void setDevice(Device device) const override { the_current_device = checked(device).index(); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) the_current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(Device device) const override {
    device = checked(device);
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, checked(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, checked(device), next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    wait_for(key_of(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note("synchronize");
    wait_for(key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    note("synchronize");
    settle(take_finished(nullptr));
  }

  // An event has the clock of its stream.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Clock;
    *static_cast<Clock*>(*event) = clock_of(key_of(stream));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    const std::lock_guard<std::mutex> lock(guard);
    merge(clocks[key_of(stream)], *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    if (event) settle(take_finished(static_cast<Clock*>(event)));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    note("event synchronize");
    if (event) settle(take_finished(static_cast<Clock*>(event)));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.001; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return the_current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = the_current_device;
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? the_current_device : exchangeDevice(index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(kType, the_current_device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard on(storage.device());
    auto fresh = device_allocator.allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept) std::memcpy(fresh.mutable_get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

}  // namespace

int device_count() {
  static const char* visible = std::getenv("PRETEND_DEVICES");
  return visible ? std::atoi(visible) : kMostDevices;
}

c10::DeviceIndex current_device() { return the_current_device; }

void set_current_device(c10::DeviceIndex index) { the_current_device = checked(Device(kType, index)).index(); }

void note(const std::string& what) {
  const std::lock_guard<std::mutex> lock(guard);
  counters[what]++;
  TORCH_CHECK(!forbidden.count(what), "pretend: forbidden here: ", what);
}

Tensor as_cpu(const Tensor& tensor) {
  check_arrived(tensor);
  return with_storage(tensor, shared_with(tensor.storage(), Device(c10::kCPU)), c10::DispatchKey::CPU);
}

void bind_group(py::module& module);  // in group.cpp

}  // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace pretend;
  c10::SetAllocator(kType, &device_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.def("device_count", &device_count);
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_device", [](int index) { set_current_device(static_cast<c10::DeviceIndex>(index)); });
  module.def("memory", [] { return std::make_pair(bytes_in_use.load(), most_bytes_in_use.load()); });
  module.def("reset_peak_memory", [] { most_bytes_in_use = bytes_in_use.load(); });
  module.def("counts", [] {
    const std::lock_guard<std::mutex> lock(guard);
    return counters;
  });
  module.def("forbid", [](std::set<std::string> what) {
    const std::lock_guard<std::mutex> lock(guard);
    forbidden = std::move(what);
  });
  bind_group(module);
}
