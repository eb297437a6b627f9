// A rank's part in a group on one host: HostCommunicator owns what the calls need (control
// segment, peers, segments, epoch, threads) and makes them, one at a time and in order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "host.h"
#include "segments.h"

namespace fastreduce {

class HostCommunicator;

// What is whose, where the call's kind does not say; and what is done with what a rank has reduced:
// one of both, or nothing.
struct Use {
  const Shares* shares = nullptr;
  const Measure* measure = nullptr;
  const Update* update = nullptr;
};

// A call in the queue of the communication thread.
class Work {
 public:
  bool done() const;
  // False if `timeout` passed first or `interrupted` said so. Throws what the call threw.
  bool wait(Clock::duration timeout, const std::function<bool()>& interrupted);
  // Of a call that is done: the sum of the ranks' weights; and its times, if they are recorded.
  double total() const { return total_; }
  const Account& account() const { return account_; }

 private:
  friend class HostCommunicator;
  void finish(std::exception_ptr error);

  void refuse_child() const;

  unsigned born_ = 0;
  const HostCommunicator* owner_ = nullptr;  // never followed
  Call call_;
  const void* in_ = nullptr;
  void* out_ = nullptr;
  Use use_;
  std::int64_t notify_ = -1;
  double total_ = 0;
  Account account_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::exception_ptr error_;
};

// The values are fastreduce/policy.py's to choose.
struct Options {
  Clock::duration timeout{};          // of any one wait
  Clock::duration connect_timeout{};  // of the rendezvous
  int blocks = 1;                     // threads that move a large buffer
  std::size_t slot_bytes = 0;         // the largest payload of a one-shot call
  std::size_t stage_bytes = 0;        // staging per block
  std::size_t block_bytes = 0;        // calls from here on use all blocks
  Patience foreground;
  Patience background;
  std::uint32_t first_epoch = 0;
};

class HostCommunicator {
 public:
  // `addresses` and `processes` are all ranks'; see Peers.
  HostCommunicator(const Listener& listener, int rank, const std::vector<std::string>& addresses,
                   const std::vector<int>& processes, const std::string& token,
                   const Options& options, const std::function<bool()>& interrupted);
  ~HostCommunicator();

  // Runs a call on this thread, after all that are queued, and returns the sum of the ranks'
  // weights. `interrupted` is asked now and then while it waits. With `account`, notes its times
  // there. `use`: of what this rank has reduced.
  double run(const Call& call, const void* in, void* out, const std::function<bool()>& interrupted,
             Account* account = nullptr, const Use& use = {});
  // Queues a call for the communication thread. With notify >= 0, next_completed() reports it.
  std::shared_ptr<Work> submit(const Call& call, const void* in, void* out, std::int64_t notify,
                               const Use& use = {});
  // Whether the communication thread keeps an Account of each call.
  void record(bool on) { recording_ = on; }
  // Waits for finished works that have a notify number and returns them, in order; empty once
  // the communicator is closed.
  using Completed = std::pair<std::int64_t, std::shared_ptr<Work>>;
  std::vector<Completed> next_completed();

  Segments& segments() { return segments_; }
  int blocks() const { return options_.blocks; }

  // Finishes what is queued (or, without `drain` or when interrupted, gives it up), tells the
  // peers, frees all. A second caller waits for the first. A signal handler within run() cannot
  // wait for the call that it interrupts: false, that call gives up and then closes.
  bool close(bool drain, const std::function<bool()>& interrupted);
  // Throws in a forked child: a lock may have been held by a thread that is not there any more.
  void refuse_child() const;
  bool forked() const;

 private:
  double execute(Call call, const void* in, void* out, const Use& use, const Watch& plan);
  void perform(HostBlock& leader, Job& job, const Watch& watch);
  int blocks_for(const Call& call) const;
  bool run_blocks(const Job& job, const Watch& watch, int count, FailureRecord* failure);
  void resolve(Job& job) const;
  bool probe_distance(HostBlock& block);
  void meet_peers(const Descriptor& own, Clock::time_point deadline,
                  const std::function<bool()>& interrupted);
  void check_usable() const;
  [[noreturn]] void throw_again() const;
  void announce(FailureRecord& record, std::uint32_t call);
  bool may_write(int peer) const;
  [[noreturn]] void give_up(FailureRecord record, bool written = false);
  Watch make_watch(const Patience& patience, const std::function<bool()>* interrupted) const;
  void communicate();
  void help(int block);
  void dismiss_helpers();

  Options options_;
  unsigned born_;
  View view_;
  std::vector<Mapping> areas_;
  Peers peers_;
  std::uint32_t epoch_;
  std::vector<Progress> progress_;
  std::vector<Call> calls_;      // what each rank announced for the current call
  std::vector<Progress> begun_;  // progress_ as the current call began
  std::uint32_t staged_calls_ = 0;
  std::atomic<bool> recording_{false};
  bool far_ = false;
  Segments segments_;

  // Calls: one at a time, in order, by the caller or by the communication thread.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool busy_ = false;
  std::atomic<bool> close_asked_{false};
  bool closing_ = false;
  bool closed_ = false;
  std::deque<std::shared_ptr<Work>> queue_;
  std::thread thread_;
  std::atomic<Failure> stop_{Failure::none};
  std::atomic<bool> broken_{false};
  FailureRecord why_;
  std::deque<Completed> completed_;
  std::condition_variable completion_;

  // Helper threads for blocks 1 and up.
  std::vector<std::thread> helpers_;
  std::mutex help_mutex_;
  std::condition_variable help_wanted_;
  std::condition_variable help_done_;
  std::uint64_t help_round_ = 0;
  int help_blocks_ = 0;
  int help_left_ = 0;
  bool help_stop_ = false;
  const Job* help_job_ = nullptr;
  const Watch* help_watch_ = nullptr;
  std::vector<FailureRecord> help_failures_;
  std::atomic<bool> block_failed_{false};
};

}  // namespace fastreduce
