// A rank's part in a group of GPUs that map each other's memory: CudaCommunicator owns what the
// kernels need between calls, and launches them.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda.h"
#include "shared_memory.h"

namespace fastreduce {

class CudaCommunicator {
 public:
  // `areas` are all ranks' control areas, zeroed, as mapped here, of layout.bytes() each. The own
  // one is made ready; peers may be called once all ranks have done that.
  CudaCommunicator(Driver& driver, const Layout& layout, int rank,
                   const std::vector<Address>& areas, std::chrono::nanoseconds timeout,
                   std::uint32_t first_epoch);
  CudaCommunicator(const CudaCommunicator&) = delete;
  CudaCommunicator& operator=(const CudaCommunicator&) = delete;
  ~CudaCommunicator();

  // Makes known memory that all ranks have allocated together: [bases[p], bases[p] + bytes) is rank
  // p's, mapped here, and `everywhere`, if not 0, is where all are accessed at once. The id is the
  // same on all ranks.
  void add_segment(int id, const std::vector<Address>& bases, Address everywhere,
                   std::size_t bytes);
  void remove_segment(int id);
  // The segment by which peers reach [memory, memory + bytes), if `everywhere` all in one access,
  // or -1.
  int find(const void* memory, std::size_t bytes, bool everywhere) const;

  // Launches a call; `in` of an encoded one is its Coding, with tables in the device's memory.
  // Throws CallFailed if an earlier one has given up, and std::invalid_argument for one that the
  // kernels cannot do; then nothing is launched.
  void run(Call call, const void* in, void* out, int blocks, Address stream);
  // Throws CallFailed if a call has given up.
  void check() const;
  // Lets waits for this peer end, now and from now on: its process has ended.
  void lose(int peer);
  // Calls lose() as one of these processes ends. Needs no interpreter, which may itself be waiting
  // for the device.
  void watch(const std::map<int, int>& processes);
  // Waits for what has been launched (without `drain`: ends it), tells the peers, frees all.
  void close(bool drain);

 private:
  struct Own {
    Address base;
    std::size_t bytes;
    bool everywhere;
  };

  void locate(Call& call, const void* memory, std::size_t bytes) const;
  void require(bool holds, const std::string& what) const;

  Driver& driver_;
  Launch launch_;  // what is the same in all
  Mailbox* mailbox_ = nullptr;
  Segment* segments_ = nullptr;
  mutable std::mutex mutex_;
  std::map<int, Own> own_;
  bool closing_ = false;  // nothing is launched any more
  bool closed_ = false;   // the mailbox is gone
  std::thread watcher_;
  Descriptor wake_;
};

}  // namespace fastreduce
