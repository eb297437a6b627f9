// The memory of a rank that its peers map, beside its control segment: which tensor lies in which
// segment, and what peers are told of it, before the first call that names it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "shared_memory.h"
#include "signal.h"

namespace fastreduce {

class Segments {
 public:
  void open(int world, int rank, Clock::duration timeout);
  // Unmaps the peers'.
  void close();

  // Of any thread. [base, base + bytes) is a mapping of `fd`: peers will map it when a call first
  // names it. Returns its id. Nothing is sent.
  int add(int fd, const void* base, std::size_t bytes);
  void remove(int id);
  // Segments that calls find by themselves: their owner tells when the memory goes away.
  void add_allocation(int id, const void* base);
  void remove_allocation(const void* base);
  bool is_allocation(const void* base) const;

  // Of the thread that makes a call. The segment and offset of its tensor, if peers can map it;
  // one that ends outside is staged.
  void locate(Call& call, const void* in, std::size_t bytes);
  // Tells the peers of a segment that the call names, if they do not know it yet, and of some that
  // have gone. Returns how many messages have been sent so far.
  std::uint32_t tell(const Peers& peers, int segment);
  // Reads what a peer has sent, up to so many messages.
  void hear(const Peers& peers, int peer, std::uint32_t until);
  // Where a peer's segment is mapped here.
  char* of(int peer, int segment) const { return remote_[peer].at(segment).data(); }

 private:
  struct Own {
    const char* base;
    std::size_t bytes;
    Descriptor fd;  // until the peers have it
  };

  void send(const Peers& peers, const Message& message, int fd);

  int rank_ = 0;
  Clock::duration timeout_{};
  std::uint32_t sent_ = 0;
  std::vector<std::map<int, Mapping>> remote_;
  std::vector<std::uint32_t> heard_;

  mutable std::mutex mutex_;  // guards what follows
  int next_ = 0;
  std::map<int, Own> own_;
  std::map<const char*, int> allocations_;
  std::vector<int> removals_;
  std::atomic<bool> removals_waiting_{false};
};

}  // namespace fastreduce
