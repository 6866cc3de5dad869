// A process group with NCCL's rules, and gloo's transport on the same memory.
#include "pretend.h"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>  // and not torch/extension.h, which takes half as long again to compile
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <set>

namespace pretend {
namespace {

using at::Tensor;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;

// Work that is done. gloo's reduce-scatter copies its result again at each wait(), so what has been changed after it
// (an average) must not be waited for once more.
class Finished final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    future->markCompleted();
    return future;
  }
};

[[noreturn]] void fail(const std::string& message) { C10_THROW_ERROR(DistBackendError, "pretend: " + message); }

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "pretend"; }
  void setTimeout(std::chrono::milliseconds limit) override { gloo_->setTimeout(limit); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    coalescing_ = true;
    coalesced_.clear();
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    for (auto& work : coalesced_) work->wait();
    coalesced_.clear();
    return c10::make_intrusive<Finished>();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto here = enter(tensors);
    announce("broadcast", here[0], options.rootRank);
    return leave(gloo_->broadcast(here, options));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto here = enter(tensors);
    announce("all_reduce", here[0], options.reduceOp);
    return reduce_by(options, here, [&](auto& changed) { return gloo_->allreduce(here, changed); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto here = enter(tensors);
    announce("all_reduce (coalesced)", here[0], options.reduceOp);
    return reduce_by(options, here, [&](auto& changed) { return gloo_->allreduce_coalesced(here, changed); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto here = enter(tensors);
    announce("reduce", here[0], options.reduceOp);
    return reduce_by(options, here, [&](auto& changed) { return gloo_->reduce(here, changed); });
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto from = enter(inputs);
    auto to = enter(outputs);
    announce("all_gather", from[0]);
    return leave(gloo_->allgather(to, from, options));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto from = enter(input), to = enter(output);
    announce("all_gather_into_tensor", from);
    return leave(gloo_->_allgather_base(to, from, options));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    auto from = enter(inputs), to = enter(outputs);
    announce("all_gather_into_tensor (coalesced)", from[0]);
    return leave(gloo_->allgather_into_tensor_coalesced(to, from, options));
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto from = enter(inputs);
    auto to = enter(outputs);
    announce("gather", from[0], options.rootRank);
    return leave(gloo_->gather(to, from, options));
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    auto to = enter(outputs);
    auto from = enter(inputs);
    announce("scatter", to[0], options.rootRank);
    return leave(gloo_->scatter(to, from, options));
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = enter(outputs);
    auto from = enter(inputs);
    announce("reduce_scatter", to[0], options.reduceOp);
    return reduce_by(options, to, [&](auto& changed) { return gloo_->reduce_scatter(to, from, changed); });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = enter(output), from = enter(input);
    announce("reduce_scatter_tensor", to, options.reduceOp);
    return reduce_by(options, {to}, [&](auto& changed) { return gloo_->_reduce_scatter_base(to, from, changed); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    auto to = enter(outputs), from = enter(inputs);
    announce("reduce_scatter_tensor (coalesced)", to[0], options.reduceOp);
    return reduce_by(options, to,
                     [&](auto& changed) { return gloo_->reduce_scatter_tensor_coalesced(to, from, changed); });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto to = enter(output), from = enter(input);
    announce("all_to_all", from, -1, /*same_size=*/false);
    return leave(gloo_->alltoall_base(to, from, output_sizes, input_sizes, options));
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    announce("barrier", at::empty({0}));
    return leave(gloo_->barrier());
  }
  // Two ranks only: there is nothing to compare with the others.
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    auto here = enter(tensors);
    return leave(gloo_->send(here, rank, tag));
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    auto here = enter(tensors);
    return leave(gloo_->recv(here, rank, tag));
  }

 private:
  // A tensor that NCCL would take, as one of gloo's.
  Tensor enter(const Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.device().type() == kType && tensor.layout() == at::kStrided,
                      "pretend: Tensors must be on the accelerator and dense, not on ", tensor.device());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "pretend: Tensors must be contiguous");
    TORCH_CHECK(!without_float64() || tensor.scalar_type() != at::kDouble, "pretend: no float64 in collectives here");
    const auto bound = getBoundDeviceId();
    if (bound && *bound != tensor.device()) {
      fail(c10::str("Attempt to perform collective on tensor not on device passed to init_process_group: ",
                    tensor.device(), " and not ", *bound));
    }
    if (!device_) connect(tensor.device());
    if (*device_ != tensor.device()) {
      fail(c10::str("a tensor on ", tensor.device(), ", and the communicator is on ", *device_,
                    "; NCCL would make a second communicator, which other ranks may never join"));
    }
    return as_cpu(tensor);
  }
  Tensors enter(const Tensors& tensors) {
    Tensors here;
    for (const auto& tensor : tensors) here.push_back(enter(tensor));
    return here;
  }
  TensorLists enter(const TensorLists& lists) {
    TensorLists here;
    for (const auto& tensors : lists) here.push_back(enter(tensors));
    return here;
  }

  WorkPtr leave(WorkPtr work) {
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  // The first collective makes the communicator: all ranks must come, each with a device of its own.
  void connect(c10::Device device) {
    device_ = device;
    const auto others = gathered(std::array<int64_t, 1>{device.index()});
    std::set<int64_t> different;
    for (const auto& other : others) different.insert(other[0]);
    if (device_count() > 1 && different.size() < others.size()) {
      fail(c10::str("Duplicate GPU detected: rank ", getRank(), " and another both use ", device));
    }
  }

  // What this rank is about to do, compared with the others. Where NCCL would hang or mix up data, this raises.
  struct Announcement {
    char name[40];
    int64_t elements, dtype, detail;
  };
  void announce(const char* name, const Tensor& tensor, int64_t detail, bool same_size = true) {
    sequence_++;
    constexpr size_t kWords = sizeof(Announcement) / sizeof(int64_t);
    Announcement mine{};
    std::strncpy(mine.name, name, sizeof(mine.name) - 1);
    mine.elements = same_size ? tensor.numel() : -1;
    mine.dtype = static_cast<int64_t>(tensor.scalar_type());
    mine.detail = detail;
    std::array<int64_t, kWords> words;
    std::memcpy(words.data(), &mine, sizeof(mine));
    const auto all = gathered(words);
    for (size_t rank = 0; rank < all.size(); rank++) {
      if (all[rank] != words) {
        Announcement theirs;
        std::memcpy(&theirs, all[rank].data(), sizeof(theirs));
        fail(c10::str("collective ", sequence_, " of this group is ", shown(mine), " on rank ", getRank(), " and ",
                      shown(theirs), " on rank ", rank, "; with NCCL the ranks would hang"));
      }
    }
  }
  void announce(const char* name, const Tensor& tensor) { announce(name, tensor, int64_t{-1}); }
  void announce(const char* name, const Tensor& tensor, const c10d::ReduceOp& op) {
    announce(name, tensor, static_cast<int64_t>(static_cast<c10d::ReduceOp::RedOpType>(op)));
  }
  static std::string shown(const Announcement& a) {
    return c10::str(a.name, " of ", a.elements, " x ", c10::toString(static_cast<c10::ScalarType>(a.dtype)), " (",
                    a.detail, ")");
  }

  template <size_t N>
  std::vector<std::array<int64_t, N>> gathered(const std::array<int64_t, N>& mine) {
    Tensors sent = {at::empty({static_cast<int64_t>(N)}, at::kLong)};
    std::memcpy(sent[0].mutable_data_ptr(), mine.data(), sizeof(mine));
    TensorLists received(1);
    for (int rank = 0; rank < getSize(); rank++) received[0].push_back(at::empty_like(sent[0]));
    gloo_->allgather(received, sent)->wait();
    std::vector<std::array<int64_t, N>> all(getSize());
    for (int rank = 0; rank < getSize(); rank++) {
      std::memcpy(all[rank].data(), received[0][rank].const_data_ptr(), sizeof(mine));
    }
    return all;
  }

  // NCCL can average, gloo adds.
  template <class Options, class Run>
  WorkPtr reduce_by(Options options, const Tensors& results, Run run) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return leave(run(options));
    options.reduceOp = c10d::ReduceOp::SUM;
    run(options)->wait();
    for (auto result : results) result.div_(getSize());
    return c10::make_intrusive<Finished>();
  }

  // HCCL and some others have none.
  static bool without_float64() {
    const char* said = std::getenv("PRETEND_NO_FLOAT64");
    return said != nullptr && *said != '\0';
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::optional<c10::Device> device_;
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

}  // namespace

void bind_group(py::module& module) {
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(module, "Group")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}

}  // namespace pretend
