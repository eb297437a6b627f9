// What the two sides of a CUDA launch share: its arguments, what it keeps on the device between
// calls, and by which memory the host talks to it. And the driver as the host's side sees it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "bucket.h"
#include "device_norm.h"
#include "run.h"
#include "topk.h"

namespace fastreduce {

constexpr int kGridLimit = 64;      // blocks of a kernel that waits
constexpr int kBlockThreads = 512;  // of such a block
constexpr int kLineRanks = 8;       // low_latency holds a word of each in registers

// In the host's memory, mapped for the device.
struct Mailbox {
  std::uint32_t stop;                  // written by the host: every wait has to end
  std::uint32_t lost[kMaxRanks / 32];  // likewise: a bit for each peer whose process has ended
  std::uint32_t failed;                // written by the device once `record` is complete
  FailureRecord record;
};

// In the device's memory, from call to call: no launch argument changes with it, so a captured
// graph can be replayed.
struct DeviceState {
  std::uint32_t epoch;   // of the last complete call
  std::uint32_t left;    // blocks that have left the current one
  std::uint32_t failed;  // a block has given up: nothing runs any more
  Progress progress[kGridLimit];
};

// A segment is memory that every rank has allocated in the same call, and mapped of every other
// rank. Where each rank's begins, here, and where all of them are accessed at once (or null).
constexpr int kSegments = 1024;
struct Segment {
  char* base[kMaxRanks];
  char* everywhere;
};

struct Launch {
  View view;
  Job job;
  Coding coding;  // of an encoded call; its tables are in the device's memory
  DeviceState* state = nullptr;
  const Segment* segments = nullptr;
  Mailbox* mailbox = nullptr;
  std::uint64_t timeout_ns = 0;
};

// What is done with the messages of a buffer in a wire format.
enum class WireStep { encode, reduce, decode };

// All tables are in the device's memory.
struct WireLaunch {
  WireStep step = WireStep::encode;
  Coding coding;
  const Part* messages = nullptr;  // messages_of() the plan
  const float* factor = nullptr;   // in place of the coding's; or null
  const char* from = nullptr;
  std::size_t stride = 0;  // bytes between one message and the next
  char* to = nullptr;
  std::size_t runs = 0;  // of all that the step handles
};

// How elements are chosen and added up: see device_topk.h.
enum class SelectStep { count, settle, tally, emit, find, combine };

struct Search;

struct SelectLaunch {
  SelectStep step = SelectStep::count;
  Coding coding;
  Selection selection;
  int digit = 0;  // that is counted, or settled
  Search* search = nullptr;
  std::size_t tiles = 0;           // of all spans
  std::uint32_t* table = nullptr;  // of the tiles, see there
  char* messages = nullptr;        // the own one that is written, or all ranks' that are read
};

// The CUDA runtime, as far as it is used. Everything is on the current device; errors are thrown.
class Driver {
 public:
  virtual ~Driver() = default;
  // Why there is no device to work with, or "".
  virtual std::string problem() = 0;
  // Blocks of the largest kernel that are on the device at once.
  virtual int resident_blocks() = 0;
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  // Memory of the host: its address here, and on the device.
  virtual std::pair<void*, void*> allocate_mapped(std::size_t bytes) = 0;
  virtual void release_mapped(void* memory) = 0;
  // Between any two memories; complete on return.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  // Waits for all that has been launched.
  virtual void synchronise() = 0;
  virtual void launch(const Launch& launch, int blocks, Address stream) = 0;
  virtual void convert(const Moves& moves, Address stream) = 0;
  virtual void wire(const WireLaunch& launch, Address stream) = 0;
  virtual void select(const SelectLaunch& launch, Address stream) = 0;
  virtual void norm(const NormLaunch& launch, Address stream) = 0;
};

// The one that is there.
Driver& cuda_driver();

}  // namespace fastreduce
