// Memory that ranks share, and the sockets that bring its file descriptors from one to the
// other. Segments are anonymous (memfd): they have no name, go away with the last process
// that maps them, and are limited by memory, not by the size of /dev/shm.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fastreduce {

// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int get() const { return fd_; }
  int release();

 private:
  int fd_ = -1;
};

// A shared mapping. Moves, never copies; unmaps at the end.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t bytes);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// An anonymous segment of zeros that nobody can shrink under a peer. Its memory is reserved
// here, so that a lack of it is an error now and not a SIGBUS at some later store.
Descriptor create_segment(std::size_t bytes);

// What a rank tells a peer beside the calls: a segment to map (with its descriptor), one to
// unmap.
struct Message {
  enum class Type : std::uint32_t { control, process, map, unmap };
  Type type = Type::control;
  std::int32_t id = -1;
  std::uint64_t bytes = 0;
};

// A peer's end of a socket is gone.
struct PeerLeft {
  int peer;
};

using Clock = std::chrono::steady_clock;

// Where a rank can be reached while a group forms: an abstract socket of this network
// namespace. Only processes of the same user that know the group's token get through.
class Listener {
 public:
  Listener();
  const std::string& address() const { return address_; }
  int fd() const { return socket_.get(); }

 private:
  Descriptor socket_;
  std::string address_;
};

// A socket to every peer, and a handle on every peer's process.
class Peers {
 public:
  Peers() = default;
  // Connects to all lower ranks and accepts all higher ones. `processes` are the ranks' process
  // numbers as this process sees them, or 0: the end of one that is awaited is an error.
  Peers(const Listener& listener, int rank, const std::vector<std::string>& addresses,
        const std::vector<int>& processes, const std::string& token, Clock::time_point deadline,
        const std::function<bool()>& interrupted);

  void send(int peer, const Message& message, int fd, Clock::time_point deadline) const;
  Message receive(int peer, Descriptor* fd, Clock::time_point deadline,
                  const std::function<bool()>& interrupted = nullptr) const;

  void watch(int peer, Descriptor process) { processes_[peer] = std::move(process); }
  // Has the peer's process ended, or become another program? A pidfd tells the first, also where
  // a child has inherited the socket; the socket tells the second.
  bool lost(int peer) const;
  void close();

 private:
  void await_connection(int listener, int missing, Clock::time_point deadline,
                        const std::function<bool()>& interrupted) const;

  std::vector<Descriptor> sockets_;
  std::vector<Descriptor> processes_;
};

// A handle on a process that can be polled for its end; -1 where the kernel has none.
Descriptor open_process(int process);

}  // namespace fastreduce
