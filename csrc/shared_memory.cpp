#include "shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

namespace fastreduce {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// Whoever waits asks this often whether it was interrupted.
constexpr long kSlice = 100;  // ms

// Waits until `fd` is ready for `events`; a passed deadline is an error.
void wait_ready(int fd, short events, Clock::time_point deadline, const std::string& what,
                const std::function<bool()>& interrupted = nullptr) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::clamp<long>(left, 0, kSlice)));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail("poll");
    if (interrupted && interrupted()) throw std::runtime_error("interrupted while " + what);
    if (ready == 0 && left <= 0) throw std::runtime_error("timed out while " + what);
  }
}

std::uint64_t read_number(const char* path, const std::string& key, std::uint64_t otherwise) {
  std::ifstream file(path);
  std::string word;
  std::uint64_t value = 0;
  while (file && !key.empty() && word != key) file >> word;
  return file >> value ? value : otherwise;
}

// Bytes that this machine, and the control group this process may run in, can still give.
std::uint64_t available_memory() {
  constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};
  const std::uint64_t machine = read_number("/proc/meminfo", "MemAvailable:", kNoLimit >> 10) << 10;
  const std::uint64_t limit = read_number("/sys/fs/cgroup/memory.max", "", kNoLimit);
  // Cached files count as used until somebody needs the room.
  const std::uint64_t used = read_number("/sys/fs/cgroup/memory.current", "", 0);
  const std::uint64_t cache = read_number("/sys/fs/cgroup/memory.stat", "inactive_file", 0);
  const std::uint64_t held = used - std::min(used, cache);
  const std::uint64_t group = limit == kNoLimit ? kNoLimit : limit - std::min(limit, held);
  return std::min(machine, group);
}

struct Hello {
  char token[32];
  std::int32_t rank;
};

Descriptor make_socket() {
  Descriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) fail("socket");
  return fd;
}

bool same_user(int fd) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         credentials.uid == ::geteuid();
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

int Descriptor::release() { return std::exchange(fd_, -1); }

Mapping::Mapping(int fd, std::size_t bytes) : bytes_(bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) fail("mmap of a shared segment");
  data_ = static_cast<char*>(at);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Descriptor create_segment(std::size_t bytes) {
  // The kernel would reserve until it has to kill somebody.
  const std::uint64_t available = available_memory();
  if (bytes > available)
    throw std::runtime_error("reserving " + std::to_string(bytes) +
                             " bytes of shared memory: only " + std::to_string(available) +
                             " are available");
  Descriptor fd(
      static_cast<int>(::syscall(SYS_memfd_create, "fastreduce", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (fd.get() < 0) fail("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail("ftruncate of a segment");
  if (const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes))) {
    errno = error;
    fail("reserving " + std::to_string(bytes) + " bytes of shared memory");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail("sealing a segment");
  return fd;
}

Listener::Listener() : socket_(make_socket()) {
  // An address of the family alone makes the kernel choose an unused abstract name.
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (::bind(socket_.get(), reinterpret_cast<sockaddr*>(&name), sizeof(sa_family_t)) != 0)
    fail("bind of an abstract socket");
  socklen_t length = sizeof name;
  if (::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&name), &length) != 0)
    fail("getsockname");
  address_.assign(name.sun_path + 1, length - sizeof(sa_family_t) - 1);
  if (::listen(socket_.get(), 128) != 0) fail("listen");
}

Peers::Peers(const Listener& listener, int rank, const std::vector<std::string>& addresses,
             const std::vector<int>& processes, const std::string& token,
             Clock::time_point deadline, const std::function<bool()>& interrupted)
    : sockets_(addresses.size()), processes_(addresses.size()) {
  Hello hello{};
  if (token.size() != sizeof hello.token)
    throw std::invalid_argument("token: expected 32 bytes, got " + std::to_string(token.size()));
  std::memcpy(hello.token, token.data(), sizeof hello.token);
  hello.rank = rank;

  for (int p = 0; p < rank; ++p) {
    sockets_[p] = make_socket();
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::string& address = addresses[p];
    if (address.empty() || address.size() + 1 > sizeof name.sun_path)
      throw std::invalid_argument("address of rank " + std::to_string(p) + " has " +
                                  std::to_string(address.size()) + " bytes");
    std::memcpy(name.sun_path + 1, address.data(), address.size());
    const auto length = static_cast<socklen_t>(sizeof(sa_family_t) + 1 + address.size());
    if (::connect(sockets_[p].get(), reinterpret_cast<sockaddr*>(&name), length) != 0)
      fail("connecting to rank " + std::to_string(p));
    if (!same_user(sockets_[p].get()))
      throw std::runtime_error("rank " + std::to_string(p) + " belongs to another user");
    if (::send(sockets_[p].get(), &hello, sizeof hello, MSG_NOSIGNAL) !=
        static_cast<ssize_t>(sizeof hello))
      fail("greeting rank " + std::to_string(p));
  }

  const int world = static_cast<int>(addresses.size());
  for (int p = rank + 1; p < world; ++p) {
    if (processes[p] <= 0) continue;
    processes_[p] = open_process(processes[p]);
    if (processes_[p].get() < 0 && errno == ESRCH)
      throw std::runtime_error("the process of rank " + std::to_string(p) + " has ended");
  }
  for (int missing = world - rank - 1; missing > 0;) {
    await_connection(listener.fd(), missing, deadline, interrupted);
    Descriptor fd(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd.get() < 0) fail("accept");
    Hello theirs{};
    // Strangers are turned away: another user, a wrong token, no greeting.
    if (!same_user(fd.get())) continue;
    pollfd entry{fd.get(), POLLIN, 0};
    if (::poll(&entry, 1, 1000) <= 0) continue;
    if (::recv(fd.get(), &theirs, sizeof theirs, 0) != static_cast<ssize_t>(sizeof theirs))
      continue;
    if (std::memcmp(theirs.token, hello.token, sizeof hello.token) != 0) continue;
    if (theirs.rank <= rank || theirs.rank >= static_cast<int>(addresses.size())) continue;
    if (sockets_[theirs.rank].get() >= 0) continue;
    sockets_[theirs.rank] = std::move(fd);
    --missing;
  }
}

void Peers::send(int peer, const Message& message, int fd, Clock::time_point deadline) const {
  iovec data{const_cast<Message*>(&message), sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  const int to = sockets_[peer].get();
  while (::sendmsg(to, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    const int why = errno;
    // A peer that has left needs no message; the next call that needs it finds that out.
    if (why == EPIPE || why == ECONNRESET) return;
    if (why != EAGAIN && why != EINTR && why != ETOOMANYREFS)
      fail("sending to rank " + std::to_string(peer));
    wait_ready(to, POLLOUT, deadline, "sending to rank " + std::to_string(peer));
    // Too many descriptors under way: until somebody has received some.
    if (why == ETOOMANYREFS) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Until somebody connects.
void Peers::await_connection(int listener, int missing, Clock::time_point deadline,
                             const std::function<bool()>& interrupted) const {
  for (;;) {
    std::vector<pollfd> entries{{listener, POLLIN, 0}};
    std::vector<int> awaited{-1};
    for (std::size_t p = 0; p < processes_.size(); ++p) {
      if (processes_[p].get() < 0 || sockets_[p].get() >= 0) continue;
      entries.push_back({processes_[p].get(), POLLIN, 0});
      awaited.push_back(static_cast<int>(p));
    }
    const int ready = ::poll(entries.data(), entries.size(), kSlice);
    if (ready < 0 && errno != EINTR) fail("poll");
    if (ready > 0 && entries[0].revents != 0) return;
    for (std::size_t i = 1; ready > 0 && i < entries.size(); ++i)
      if (entries[i].revents != 0)
        throw std::runtime_error("the process of rank " + std::to_string(awaited[i]) +
                                 " has ended");
    if (interrupted && interrupted()) throw std::runtime_error("interrupted");
    if (Clock::now() >= deadline)
      throw std::runtime_error("timed out while " + std::to_string(missing) +
                               " ranks had not connected");
  }
}

Message Peers::receive(int peer, Descriptor* fd, Clock::time_point deadline,
                       const std::function<bool()>& interrupted) const {
  Message message;
  iovec data{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const int from = sockets_[peer].get();
  wait_ready(from, POLLIN, deadline, "receiving from rank " + std::to_string(peer), interrupted);
  const ssize_t got = ::recvmsg(from, &header, MSG_CMSG_CLOEXEC);
  if (got == 0 || (got < 0 && errno == ECONNRESET)) throw PeerLeft{peer};
  if (got != static_cast<ssize_t>(sizeof message))
    fail("receiving from rank " + std::to_string(peer));
  if ((header.msg_flags & MSG_CTRUNC) != 0)
    throw std::runtime_error("no descriptor left for memory of rank " + std::to_string(peer));
  const cmsghdr* rights = CMSG_FIRSTHDR(&header);
  if (rights != nullptr && rights->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(rights), sizeof received);
    *fd = Descriptor(received);
  }
  return message;
}

bool Peers::lost(int peer) const {
  pollfd entries[] = {{processes_[peer].get(), POLLIN, 0}, {sockets_[peer].get(), POLLRDHUP, 0}};
  if (::poll(entries, 2, 0) <= 0) return false;
  return entries[0].revents != 0 || (entries[1].revents & (POLLRDHUP | POLLHUP)) != 0;
}

void Peers::close() {
  sockets_.clear();
  processes_.clear();
}

Descriptor open_process(int process) {
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
}

}  // namespace fastreduce
