#include "segments.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <system_error>

namespace fastreduce {
namespace {

// Segments that peers are told to unmap in one call.
constexpr std::size_t kRemovalsPerCall = 16;

}  // namespace

void Segments::open(int world, int rank, Clock::duration timeout) {
  rank_ = rank;
  timeout_ = timeout;
  remote_.resize(world);
  heard_.resize(world);
}

void Segments::close() {
  for (auto& maps : remote_) maps.clear();
}

int Segments::add(int fd, const void* base, std::size_t bytes) {
  Descriptor own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (own.get() < 0)
    throw std::system_error(errno, std::generic_category(),
                            "keeping a shared segment's descriptor");
  std::lock_guard<std::mutex> lock(mutex_);
  const int id = next_++;
  own_[id] = {static_cast<const char*>(base), bytes, std::move(own)};
  return id;
}

void Segments::remove(int id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = own_.find(id);
  if (found == own_.end()) return;
  if (found->second.fd.get() < 0) {  // the peers have mapped it
    removals_.push_back(id);
    removals_waiting_ = true;
  }
  own_.erase(found);
}

void Segments::add_allocation(int id, const void* base) {
  std::lock_guard<std::mutex> lock(mutex_);
  allocations_[static_cast<const char*>(base)] = id;
}

void Segments::remove_allocation(const void* base) {
  std::lock_guard<std::mutex> lock(mutex_);
  allocations_.erase(static_cast<const char*>(base));
}

bool Segments::is_allocation(const void* base) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return allocations_.count(static_cast<const char*>(base)) != 0;
}

void Segments::locate(Call& call, const void* in, std::size_t bytes) {
  const auto* begin = static_cast<const char*>(in);
  std::lock_guard<std::mutex> lock(mutex_);
  if (call.segment < 0) {
    const auto after = allocations_.upper_bound(begin);
    if (after == allocations_.begin()) return;
    call.segment = std::prev(after)->second;
  }
  const Own& own = own_.at(call.segment);
  call.offset = static_cast<std::uint64_t>(begin - own.base);
  if (call.offset + bytes > own.bytes) call.segment = -1;
}

// A few removals per call: peers read them within that call, so a socket never fills and a send
// never has to wait for a peer that itself sends.
std::uint32_t Segments::tell(const Peers& peers, int segment) {
  if (segment < 0 && !removals_waiting_) return sent_;
  Descriptor fd;
  Message map{Message::Type::map, segment, 0};
  std::vector<int> removals;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (segment >= 0) {
      Own& own = own_.at(segment);
      fd = std::move(own.fd);
      map.bytes = own.bytes;
    }
    const std::size_t n = std::min<std::size_t>(removals_.size(), kRemovalsPerCall);
    removals.assign(removals_.end() - static_cast<std::ptrdiff_t>(n), removals_.end());
    removals_.resize(removals_.size() - n);
    removals_waiting_ = !removals_.empty();
  }
  if (fd.get() >= 0) send(peers, map, fd.get());
  for (const int id : removals) send(peers, {Message::Type::unmap, id, 0}, -1);
  return sent_;
}

void Segments::send(const Peers& peers, const Message& message, int fd) {
  const auto deadline = Clock::now() + timeout_;
  const int world = static_cast<int>(remote_.size());
  for (int p = 0; p < world; ++p)
    if (p != rank_ && !peers.lost(p)) peers.send(p, message, fd, deadline);
  ++sent_;
}

void Segments::hear(const Peers& peers, int peer, std::uint32_t until) {
  if (heard_[peer] == until) return;
  const auto deadline = Clock::now() + timeout_;
  while (heard_[peer] != until) {
    Descriptor fd;
    const Message message = peers.receive(peer, &fd, deadline);
    ++heard_[peer];
    if (message.type == Message::Type::map)
      remote_[peer].emplace(message.id, Mapping(fd.get(), message.bytes));
    else
      remote_[peer].erase(message.id);
  }
}

}  // namespace fastreduce
