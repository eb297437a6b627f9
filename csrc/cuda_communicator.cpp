#include "cuda_communicator.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace fastreduce {

CudaCommunicator::CudaCommunicator(Driver& driver, const Layout& layout, int rank,
                                   const std::vector<Address>& areas,
                                   std::chrono::nanoseconds timeout, std::uint32_t first_epoch)
    : driver_(driver) {
  const int world = static_cast<int>(areas.size());
  require(world >= 2 && world <= kMaxRanks && world == layout.world,
          "ranks: expected 2 to " + std::to_string(kMaxRanks) + ", got " + std::to_string(world));
  require(layout.blocks >= 1 && layout.blocks <= kGridLimit,
          "blocks: expected 1 to " + std::to_string(kGridLimit) + ", got " +
              std::to_string(layout.blocks));
  View& view = launch_.view;
  view.layout = layout;
  view.rank = rank;
  for (int p = 0; p < world; ++p) view.area[p] = reinterpret_cast<char*>(areas[p]);
  launch_.timeout_ns = static_cast<std::uint64_t>(timeout.count());
  try {
    const auto [here, there] = driver.allocate_mapped(sizeof(Mailbox));
    mailbox_ = new (here) Mailbox();
    launch_.mailbox = static_cast<Mailbox*>(there);

    DeviceState state = {};
    state.epoch = first_epoch;
    for (Progress& each : state.progress) each = {first_epoch, first_epoch, first_epoch};
    launch_.state = static_cast<DeviceState*>(driver.allocate(sizeof state));
    driver.copy(launch_.state, &state, sizeof state);

    segments_ = static_cast<Segment*>(driver.allocate(kSegments * sizeof(Segment)));
    launch_.segments = segments_;

    // The flags as the host sees them, and from there to the device.
    std::vector<char> area(layout.slots() + kLineBytes);
    const auto address = reinterpret_cast<Address>(area.data());
    View image = view;
    image.area[rank] = area.data() + (kLineBytes - address % kLineBytes) % kLineBytes;
    initialise(image, first_epoch);
    driver.copy(view.area[rank], image.area[rank], layout.slots());
  } catch (...) {
    if (mailbox_ != nullptr) driver.release_mapped(mailbox_);
    driver.release(launch_.state);
    driver.release(segments_);
    throw;
  }
}

CudaCommunicator::~CudaCommunicator() {
  try {
    close(false);
  } catch (...) {
    // The device is gone, and with it all that could be freed.
  }
}

void CudaCommunicator::require(bool holds, const std::string& what) const {
  if (!holds) throw std::invalid_argument(what);
}

void CudaCommunicator::add_segment(int id, const std::vector<Address>& bases, Address everywhere,
                                   std::size_t bytes) {
  const View& view = launch_.view;
  std::lock_guard<std::mutex> lock(mutex_);
  require(!closing_, "the communicator is closed");
  require(id >= 0 && id < kSegments,
          "symmetric tensors: there are " + std::to_string(kSegments) + " already");
  require(static_cast<int>(bases.size()) == view.world(), "bases: expected one of each rank");
  Segment segment = {};
  for (int p = 0; p < view.world(); ++p) segment.base[p] = reinterpret_cast<char*>(bases[p]);
  segment.everywhere = reinterpret_cast<char*>(everywhere);
  driver_.copy(segments_ + id, &segment, sizeof segment);
  own_[id] = {bases[view.rank], bytes, everywhere != 0};
}

void CudaCommunicator::remove_segment(int id) {
  std::lock_guard<std::mutex> lock(mutex_);
  own_.erase(id);
}

// A pack never crosses a tensor's begin: one that does not lie on packs is not reached.
void CudaCommunicator::locate(Call& call, const void* memory, std::size_t bytes) const {
  const auto at = reinterpret_cast<Address>(memory);
  call.segment = -1;
  call.offset = 0;
  if (at % kPackBytes != 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [id, own] : own_) {
    if (at < own.base || at + bytes > own.base + own.bytes) continue;
    call.segment = id;
    call.offset = at - own.base;
  }
}

int CudaCommunicator::find(const void* memory, std::size_t bytes, bool everywhere) const {
  Call call;
  locate(call, memory, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = own_.find(call.segment);
  const bool reached = found != own_.end() && (found->second.everywhere || !everywhere);
  return reached ? call.segment : -1;
}

void CudaCommunicator::run(Call call, const void* in, void* out, int blocks, Address stream) {
  const Layout& layout = launch_.view.layout;
  const std::size_t bytes = input_bytes(call, layout.world);
  check();
  require(
      blocks >= 1 && blocks <= layout.blocks,
      "blocks: expected 1 to " + std::to_string(layout.blocks) + ", got " + std::to_string(blocks));
  const auto at_most = [&](const char* name, std::size_t limit) {
    require(bytes <= limit, std::string(name) + ": expected at most " + std::to_string(limit) +
                                " bytes, got " + std::to_string(bytes));
  };
  call.segment = -1;
  switch (call.algorithm) {
    case Algorithm::one_shot:
      at_most("one_shot", layout.slot_bytes);
      break;
    case Algorithm::low_latency:
      at_most("low_latency", layout.inbox_bytes);
      require(layout.world <= kLineRanks, "low_latency: expected at most " +
                                              std::to_string(kLineRanks) + " ranks, got " +
                                              std::to_string(layout.world));
      require(call.kind == Kind::all_reduce, "low_latency: expected an all_reduce");
      break;
    case Algorithm::multimem: {
      const bool able = call.dtype == DType::float32 || call.dtype == DType::float16 ||
                        call.dtype == DType::bfloat16;
      require(able && (call.op == Op::sum || call.op == Op::mean),
              "multimem: expected a sum or mean of float32, float16 or bfloat16");
      require(bytes % kPackBytes == 0,
              "multimem: expected a multiple of 16 bytes, got " + std::to_string(bytes));
      require(call.kind == Kind::all_reduce, "multimem: expected an all_reduce");
      require(find(in, bytes, true) >= 0, "multimem: expected memory with a multicast address");
      locate(call, in, bytes);
      break;
    }
    case Algorithm::two_shot:
      locate(call, in, bytes);
      require(call.segment >= 0 || bytes == 0, "two_shot: expected symmetric memory");
      require(call.kind != Kind::all_reduce || in == out, "two_shot: expected in == out");
      break;
    case Algorithm::ring:
      require(call.kind == Kind::all_reduce, "ring: expected an all_reduce");
      break;
    case Algorithm::encoded: {
      const Plan& plan = static_cast<const Coding*>(in)->plan;
      const std::size_t room = EncodedSlots::of(layout, true).room;
      require(call.kind == Kind::all_reduce, "encoded: expected an all_reduce");
      require(plan.world == layout.world, "encoded: expected a plan of " +
                                              std::to_string(layout.world) + " ranks, got one of " +
                                              std::to_string(plan.world));
      require(plan.record <= room, "encoded: expected runs of at most " + std::to_string(room) +
                                       " bytes, got " + std::to_string(plan.record));
      break;
    }
  }
  Launch launch = launch_;
  launch.job.call = call;
  launch.job.in = in;
  launch.job.out = out;
  if (call.algorithm == Algorithm::encoded) launch.coding = *static_cast<const Coding*>(in);
  driver_.launch(launch, blocks, stream);
}

void CudaCommunicator::check() const {
  const View& view = launch_.view;
  std::lock_guard<std::mutex> lock(mutex_);
  require(!closing_, "the communicator is closed");
  if (load_acquire(&mailbox_->failed) != 0) throw CallFailed{mailbox_->record, view.rank};
}

void CudaCommunicator::lose(int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  require(peer >= 0 && peer < launch_.view.world(), "peer: no rank " + std::to_string(peer));
  if (closed_) return;
  std::uint32_t& word = mailbox_->lost[peer / 32];
  store_release(&word, word | 1u << peer % 32);
}

void CudaCommunicator::watch(const std::map<int, int>& processes) {
  require(!watcher_.joinable(), "peers are watched already");
  wake_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
  if (wake_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  std::vector<pollfd> polled{{wake_.get(), POLLIN, 0}};
  std::vector<Descriptor> opened;
  std::vector<int> ranks;
  for (const auto& [peer, process] : processes) {
    Descriptor fd(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
    if (fd.get() < 0) {
      if (errno == ESRCH) lose(peer);
      continue;  // without a descriptor, the waits' own timeout is left
    }
    polled.push_back({fd.get(), POLLIN, 0});
    opened.push_back(std::move(fd));
    ranks.push_back(peer);
  }
  watcher_ =
      std::thread([this, polled = std::move(polled), opened = std::move(opened), ranks]() mutable {
        for (;;) {
          if (::poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
          if (polled[0].revents != 0) return;
          for (std::size_t i = 1; i < polled.size(); ++i) {
            if (polled[i].revents == 0) continue;
            polled[i].fd = -1;  // is not polled any more
            polled[i].revents = 0;
            lose(ranks[i - 1]);
          }
        }
      });
}

void CudaCommunicator::close(bool drain) {
  const View& view = launch_.view;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return;
    closing_ = true;
    if (!drain) store_release(&mailbox_->stop, 1);
  }
  driver_.synchronise();  // peers may be lost meanwhile
  if (watcher_.joinable()) {
    const std::uint64_t one = 1;
    while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
    watcher_.join();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  const auto word =
      static_cast<std::uint32_t>(mailbox_->failed != 0 ? State::failed : State::closed);
  for (int p = 0; p < view.world(); ++p)
    if (p != view.rank) driver_.copy(&view.state(p, view.rank).value, &word, sizeof word);
  driver_.release_mapped(mailbox_);
  driver_.release(launch_.state);
  driver_.release(segments_);
}

}  // namespace fastreduce
