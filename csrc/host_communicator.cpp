#include "host_communicator.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>
#include <system_error>

namespace fastreduce {
namespace {

// How long a rank that gave up waits for peers that write into its tensor.
constexpr std::chrono::seconds kStopWait{5};

// Every so many staged calls the distance between the ranks' cores is measured anew, as the
// time of a barrier in the quicker of two groups. Within one cache a barrier was seen to take 40
// to 100 ns, across caches 180 to 360 ns.
constexpr std::uint32_t kProbeEvery = 16;
constexpr int kProbeGroups = 2;
constexpr int kProbeBarriers = 3;
constexpr std::chrono::nanoseconds kFar{140};

// The communicators in whose calls this thread is. Only a signal handler can find its own there.
thread_local std::vector<const HostCommunicator*> inside;

class Within {
 public:
  explicit Within(const HostCommunicator* communicator) { inside.push_back(communicator); }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;
  ~Within() { inside.pop_back(); }
};

bool is_within(const HostCommunicator* communicator) {
  return std::find(inside.begin(), inside.end(), communicator) != inside.end();
}

void refuse_within(const HostCommunicator* communicator) {
  if (is_within(communicator))
    throw std::runtime_error("called by a signal handler within a call of this communicator");
}

std::atomic<unsigned> generation{0};

void count_fork() { ++generation; }

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, count_fork);

}  // namespace

bool Work::done() const {
  refuse_child();
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

void Work::refuse_child() const {
  if (born_ != generation) throw std::runtime_error("this call belongs to the parent process");
}

bool Work::wait(Clock::duration timeout, const std::function<bool()>& interrupted) {
  refuse_child();
  refuse_within(owner_);
  const Within within(owner_);
  const auto deadline = Clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!done_) {
    const auto now = Clock::now();
    if (now >= deadline) return false;
    finished_.wait_until(lock, std::min(deadline, now + Clock::duration(kLook)));
    if (done_) break;
    lock.unlock();
    const bool stop = interrupted && interrupted();
    lock.lock();
    if (stop) return false;
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

void Work::finish(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  error_ = std::move(error);
  finished_.notify_all();
}

HostCommunicator::HostCommunicator(const Listener& listener, int rank,
                                   const std::vector<std::string>& addresses,
                                   const std::vector<int>& processes, const std::string& token,
                                   const Options& options, const std::function<bool()>& interrupted)
    : options_(options), born_(generation), epoch_(options.first_epoch) {
  const int world = static_cast<int>(addresses.size());
  if (world < 1 || world > kMaxRanks)
    throw std::invalid_argument("ranks on a host: expected 1 to " + std::to_string(kMaxRanks) +
                                ", got " + std::to_string(world));
  if (options.blocks < 1 || options.blocks > kMaxBlocks)
    throw std::invalid_argument("blocks: expected 1 to " + std::to_string(kMaxBlocks) + ", got " +
                                std::to_string(options.blocks));
  const auto deadline = Clock::now() + options_.connect_timeout;
  // A piece of encoded() is one record of a chunk at least, of whatever format.
  const std::size_t records = Pipeline::kSlots * (world + 1) * kMostOfRun * sizeof(float);
  const std::size_t stage_bytes = std::max(options.stage_bytes, records);
  view_.layout = {world, options.blocks, options.slot_bytes, stage_bytes};
  view_.rank = rank;
  progress_.assign(options.blocks, {options.first_epoch, options.first_epoch, options.first_epoch});
  areas_.resize(world);
  segments_.open(world, rank, options.timeout);
  calls_.resize(world);
  begun_ = progress_;

  const std::size_t bytes = view_.layout.bytes();
  const Descriptor own = create_segment(bytes);
  areas_[rank] = Mapping(own.get(), bytes);
  view_.area[rank] = areas_[rank].data();
  initialise(view_, options.first_epoch);

  peers_ = Peers(listener, rank, addresses, processes, token, deadline, interrupted);
  try {
    meet_peers(own, deadline, interrupted);
  } catch (const PeerLeft& left) {
    throw std::runtime_error("rank " + std::to_string(left.peer) + " left while the group formed");
  }
  help_failures_.resize(options.blocks);
  try {
    for (int b = 1; b < options.blocks; ++b) helpers_.emplace_back([this, b] { help(b); });
  } catch (...) {
    dismiss_helpers();
    throw;
  }
}

// Everybody sends a handle on its process and its control segment, and maps the others'.
void HostCommunicator::meet_peers(const Descriptor& own, Clock::time_point deadline,
                                  const std::function<bool()>& interrupted) {
  const int world = view_.world();
  const int rank = view_.rank;
  const std::size_t bytes = view_.layout.bytes();
  const Descriptor process = open_process(::getpid());
  for (int p = 0; p < world; ++p) {
    if (p == rank) continue;
    peers_.send(p, {Message::Type::control, -1, bytes}, own.get(), deadline);
    peers_.send(p, {Message::Type::process, -1, 0}, process.get(), deadline);
  }
  for (int p = 0; p < world; ++p) {
    if (p == rank) continue;
    Descriptor fd;
    const Message control = peers_.receive(p, &fd, deadline, interrupted);
    if (control.type != Message::Type::control || control.bytes != bytes || fd.get() < 0)
      throw std::runtime_error("rank " + std::to_string(p) + " sent a control segment of " +
                               std::to_string(control.bytes) + " bytes, expected " +
                               std::to_string(bytes) + ": do all ranks run the same version?");
    areas_[p] = Mapping(fd.get(), bytes);
    view_.area[p] = areas_[p].data();
    Descriptor handle;
    peers_.receive(p, &handle, deadline, interrupted);
    peers_.watch(p, std::move(handle));
  }
}

HostCommunicator::~HostCommunicator() { close(false, nullptr); }

void HostCommunicator::dismiss_helpers() {
  {
    std::lock_guard<std::mutex> lock(help_mutex_);
    help_stop_ = true;
    help_wanted_.notify_all();
  }
  for (auto& helper : helpers_) helper.join();
  helpers_.clear();
}

bool HostCommunicator::forked() const { return born_ != generation; }

// Before any lock: the fork may have come while another thread held it.
void HostCommunicator::refuse_child() const {
  if (forked())
    throw std::runtime_error(
        "this communicator belongs to the parent process; create one after the fork");
}

void HostCommunicator::check_usable() const {
  if (broken_) throw_again();
  if (closing_) throw std::runtime_error("the communicator is closed");
}

// Of an earlier call: this one has not begun.
void HostCommunicator::throw_again() const {
  FailureRecord record = why_;
  record.ran = false;
  throw CallFailed{record, view_.rank};
}

Watch HostCommunicator::make_watch(const Patience& patience,
                                   const std::function<bool()>* interrupted) const {
  Watch watch;
  watch.view = &view_;
  watch.peers = &peers_;
  watch.stop = &stop_;
  watch.interrupted = interrupted;
  watch.patience = patience;
  watch.timeout = options_.timeout;
  return watch;
}

double HostCommunicator::run(const Call& call, const void* in, void* out,
                             const std::function<bool()>& interrupted, Account* account,
                             const Use& use) {
  refuse_child();
  // The last thing that happens here, if a signal handler closed the communicator meanwhile.
  struct Close {
    HostCommunicator& of;
    ~Close() {
      if (of.close_asked_) of.close(false, nullptr);
    }
  } close_at_last{*this};
  refuse_within(this);
  std::unique_lock<std::mutex> lock(mutex_);
  check_usable();
  if (busy_ || !queue_.empty()) {
    lock.unlock();
    const auto work = submit(call, in, out, -1, use);
    if (!work->wait(Clock::duration::max() / 4, interrupted)) {
      // The call cannot be taken back while peers take part in it: give up the communicator.
      stop_ = Failure::interrupted;
      work->wait(Clock::duration::max() / 4, nullptr);
    }
    if (account != nullptr) *account = work->account();
    return work->total();
  }
  busy_ = true;
  lock.unlock();
  const Within within(this);
  struct Idle {
    HostCommunicator& of;
    ~Idle() {
      std::lock_guard<std::mutex> guard(of.mutex_);
      of.busy_ = false;
      if (!of.queue_.empty() || of.closing_) of.changed_.notify_all();
    }
  } idle{*this};
  Watch watch = make_watch(options_.foreground, &interrupted);
  watch.account = account;
  if (account != nullptr) account->begin = Clock::now();
  const double total = execute(call, in, out, use, watch);
  if (account != nullptr) account->end = Clock::now();
  return total;
}

std::shared_ptr<Work> HostCommunicator::submit(const Call& call, const void* in, void* out,
                                               std::int64_t notify, const Use& use) {
  refuse_child();
  refuse_within(this);
  auto work = std::make_shared<Work>();
  work->born_ = born_;
  work->owner_ = this;
  work->call_ = call;
  work->in_ = in;
  work->out_ = out;
  work->use_ = use;
  work->notify_ = notify;
  std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  if (!thread_.joinable()) thread_ = std::thread([this] { communicate(); });
  queue_.push_back(work);
  changed_.notify_all();
  return work;
}

void HostCommunicator::communicate() {
  const std::function<bool()> never;
  const Watch watch = make_watch(options_.background, &never);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !busy_ && (!queue_.empty() || closing_); });
    if (queue_.empty()) return;
    const std::shared_ptr<Work> work = queue_.front();
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      if (broken_) throw_again();
      if (stop_ != Failure::none) {
        FailureRecord record;
        record.failure = stop_;
        record.kind = work->call_.kind;
        record.rank = record.peer = view_.rank;
        record.epoch = epoch_ + 1;
        announce(record, epoch_ + 1);
        throw CallFailed{record, view_.rank};
      }
      Watch noted = watch;
      if (recording_) {
        noted.account = &work->account_;
        work->account_.begin = Clock::now();
      }
      work->total_ = execute(work->call_, work->in_, work->out_, work->use_, noted);
      if (noted.account != nullptr) work->account_.end = Clock::now();
    } catch (...) {
      error = std::current_exception();
    }
    work->finish(error);
    lock.lock();
    busy_ = false;
    changed_.notify_all();
    if (work->notify_ >= 0) {
      completed_.emplace_back(work->notify_, work);
      completion_.notify_all();
    }
  }
}

std::vector<HostCommunicator::Completed> HostCommunicator::next_completed() {
  std::unique_lock<std::mutex> lock(mutex_);
  completion_.wait(lock, [this] { return !completed_.empty() || closed_; });
  std::vector<Completed> taken(completed_.begin(), completed_.end());
  completed_.clear();
  return taken;
}

// `call` is the one that this rank does not complete.
void HostCommunicator::announce(FailureRecord& record, std::uint32_t call) {
  view_.failure(view_.rank) = record;
  view_.given_up(view_.rank) = call;
  for (int p = 0; p < view_.world(); ++p)
    if (p != view_.rank)
      store_ordered(&view_.state(p, view_.rank).value, static_cast<std::uint32_t>(State::failed));

  // Peers that were faster may be writing into the tensor of this call. They stop at their next
  // wait, for this rank has failed; a stopped process is not waited for long.
  const auto deadline = Clock::now() + std::min<Clock::duration>(options_.timeout, kStopWait);
  for (int p = 0; p < view_.world(); ++p) {
    if (p == view_.rank || load_ordered(&view_.claim(view_.rank, p).value) != call) continue;
    record.written = true;
    while (may_write(p) && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  why_ = record;
  broken_ = true;
}

// Whether a peer that has claimed this rank's tensor may still write into it: it has neither
// left nor told, block by block, that its part of the call is done.
bool HostCommunicator::may_write(int peer) const {
  if (load_acquire(&view_.state(view_.rank, peer).value) != 0 || peers_.lost(peer)) return false;
  for (int b = 0; b < blocks_for(calls_[view_.rank]); ++b)
    if (!reached(load_acquire(&view_.step(view_.rank, b, peer).value), begun_[b].steps + 1))
      return true;
  return false;
}

void HostCommunicator::give_up(FailureRecord record, bool written) {
  record.written = record.ran = written;  // a peer's record tells of the peer's tensor
  announce(record, epoch_);
  throw CallFailed{record, view_.rank};
}

// Returns the sum of the ranks' weights.
double HostCommunicator::execute(Call call, const void* in, void* out, const Use& use,
                                 const Watch& plan) {
  const std::size_t bytes = input_bytes(call, view_.world());
  const bool one_shot = call.algorithm == Algorithm::one_shot;
  if (one_shot && bytes > view_.layout.slot_bytes)
    throw std::invalid_argument("one_shot: expected at most " +
                                std::to_string(view_.layout.slot_bytes) + " bytes, got " +
                                std::to_string(bytes));
  Job job;
  ++epoch_;
  job.in = in;
  job.out = out;
  job.shares = use.shares;
  job.measure = use.measure;
  job.update = use.update;
  begun_ = progress_;
  calls_[view_.rank] = call;
  Watch watch = plan;
  watch.kind = call.kind;
  watch.epoch = epoch_;
  FailureRecord record;
  record.kind = call.kind;
  record.epoch = epoch_;
  try {
    if (!one_shot) segments_.locate(call, in, bytes);
    call.messages = segments_.tell(peers_, call.segment);
    job.call = call;
    if (one_shot && bytes != 0 && (call.kind != Kind::broadcast || call.root == view_.rank))
      std::memcpy(view_.slot(view_.rank, epoch_), in, bytes);

    HostBlock leader(watch, progress_[0], 0, 1);
    Call* const calls = calls_.data();
    if (!enter(leader, view_, epoch_, call, calls)) give_up(leader.failure());
    const int failed = failed_peer(view_, epoch_);
    if (failed >= 0) give_up(view_.failure(failed));
    for (int p = 1; p < view_.world(); ++p) {
      if (std::memcmp(&calls[0], &calls[p], offsetof(Call, segment)) == 0) continue;
      const Difference difference = differ(calls[0], calls[p]);
      record.failure = Failure::mismatch;
      record.field = difference.field;
      record.peer = p;
      record.expected = difference.expected;
      record.seen = difference.seen;
      give_up(record);
    }
    const int odd = differ_in_weights(calls, view_.world());
    if (odd >= 0) {
      record.failure = Failure::mismatch;
      record.field = Field::weight;
      record.peer = odd;
      record.seen = calls[odd].weight >= 0;
      record.expected = !record.seen;
      give_up(record);
    }
    double weights[kMaxRanks];
    for (int p = 0; p < view_.world(); ++p) weights[p] = weight_of(calls, view_.world(), p);
    job.calls = calls;
    job.total = total_of(weights, view_.world());
    perform(leader, job, watch);
    return job.total;
  } catch (const CallFailed&) {
    throw;
  } catch (const PeerLeft& left) {
    const auto last = load_acquire(&view_.state(view_.rank, left.peer).value);
    record.failure =
        last == static_cast<std::uint32_t>(State::open) ? Failure::lost : Failure::closed;
    record.rank = view_.rank;
    record.peer = left.peer;
    record.expected = record.seen = epoch_;
    give_up(record);
  } catch (...) {
    // Not a protocol's failure but this machine's. Peers must not wait for this rank.
    record.failure = Failure::broken;
    record.rank = record.peer = view_.rank;
    announce(record, epoch_);
    throw;
  }
}

void HostCommunicator::perform(HostBlock& leader, Job& job, const Watch& watch) {
  const Call& call = job.call;
  const Call* const calls = job.calls;
  for (int p = 0; p < view_.world(); ++p)
    if (p != view_.rank) segments_.hear(peers_, p, calls[p].messages);
  if (call.count == 0) return;
  // A rank alone has no neighbour and needs no slot.
  if (view_.world() == 1 && call.algorithm != Algorithm::encoded)
    job.call.algorithm = Algorithm::two_shot;
  if (job.call.algorithm == Algorithm::two_shot) resolve(job);

  // An update is as final as a store into a peer's tensor: who gives up has to know of it.
  if (job.direct && (call.kind == Kind::all_reduce || job.update != nullptr)) {
    const int failed = claim_peers(view_, epoch_);
    if (failed >= 0) give_up(view_.failure(failed));
  }
  const bool staged = job.call.algorithm == Algorithm::two_shot && !job.direct;
  if (staged && staged_calls_++ % kProbeEvery == 0 && !probe_distance(leader))
    give_up(leader.failure());
  job.far = far_;

  FailureRecord failure;
  if (!run_blocks(job, watch, blocks_for(call), &failure)) give_up(failure, true);
  if (job.call.algorithm == Algorithm::one_shot || job.direct) return;  // used on the way
  const bool whole = job.call.kind == Kind::all_reduce;
  if (job.measure != nullptr)
    kernels().measure(*job.measure, whole ? view_.rank : 0, whole ? view_.world() : 1, call.dtype,
                      job.out, call.count);
  if (job.update != nullptr) kernels().update(*job.update, call.dtype);
}

// Virtual cores move between physical ones, every few to tens of seconds: look again and again.
// All ranks look in the same call, and each may decide for itself.
bool HostCommunicator::probe_distance(HostBlock& block) {
  if (options_.foreground.spin.count() == 0) return true;  // ranks share cores: no distance
  if (!barrier(block, view_, Phase::reduce)) return false;
  auto best = Clock::duration::max();
  for (int group = 0; group < kProbeGroups; ++group) {
    const auto begin = Clock::now();
    for (int i = 0; i < kProbeBarriers; ++i)
      if (!barrier(block, view_, Phase::reduce)) return false;
    best = std::min(best, (Clock::now() - begin) / kProbeBarriers);
  }
  far_ = best >= kFar;
  return true;
}

int HostCommunicator::blocks_for(const Call& call) const {
  const bool large = call.algorithm != Algorithm::one_shot &&
                     input_bytes(call, view_.world()) >= options_.block_bytes;
  return large ? options_.blocks : 1;
}

bool HostCommunicator::run_blocks(const Job& job, const Watch& plan, int count,
                                  FailureRecord* failure) {
  const bool helped = count > 1;
  Watch watch = plan;
  if (helped) {
    watch.siblings = &block_failed_;
    std::lock_guard<std::mutex> lock(help_mutex_);
    help_job_ = &job;
    help_watch_ = &watch;
    help_blocks_ = count;
    help_left_ = count - 1;
    ++help_round_;
    help_wanted_.notify_all();
  }
  HostBlock block(watch, progress_[0], 0, count);
  const bool complete = kernels().run(block, view_, job, watch.epoch);
  if (!complete) {
    *failure = block.failure();
    block_failed_ = true;
  }
  if (!helped) return complete;

  std::unique_lock<std::mutex> lock(help_mutex_);
  help_done_.wait(lock, [this] { return help_left_ == 0; });
  for (int b = 1; b < count; ++b)
    if (failure->failure == Failure::none || failure->failure == Failure::sibling)
      *failure = help_failures_[b];
  return !block_failed_;
}

void HostCommunicator::help(int index) {
  std::uint64_t round = 0;
  std::unique_lock<std::mutex> lock(help_mutex_);
  for (;;) {
    help_wanted_.wait(lock, [&] { return help_stop_ || help_round_ != round; });
    if (help_stop_) return;
    round = help_round_;
    if (index >= help_blocks_) continue;
    const Job& job = *help_job_;
    // Only the caller's thread may ask whether it was interrupted, and keeps the account.
    Watch watch = *help_watch_;
    watch.interrupted = nullptr;
    watch.account = nullptr;
    const int count = help_blocks_;
    lock.unlock();
    HostBlock block(watch, progress_[index], index, count);
    if (!kernels().run(block, view_, job, watch.epoch)) block_failed_ = true;
    lock.lock();
    help_failures_[index] = block.failure();
    if (--help_left_ == 0) help_done_.notify_all();
  }
}

// Every rank decides from the same announcements, so all decide alike.
void HostCommunicator::resolve(Job& job) const {
  const Call* const calls = job.calls;
  const bool rooted = job.call.kind == Kind::broadcast;
  for (int p = 0; p < view_.world(); ++p) {
    if (rooted && p != job.call.root) continue;
    if (view_.world() > 1 && calls[p].segment < 0) return;
    job.peers[p] = p == view_.rank ? const_cast<void*>(job.in)
                                   : segments_.of(p, calls[p].segment) + calls[p].offset;
  }
  job.direct = true;
}

bool HostCommunicator::close(bool drain, const std::function<bool()>& interrupted) {
  if (forked()) return true;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_within(this)) {
      stop_ = Failure::closed;
      close_asked_ = true;
      return false;
    }
    if (!drain) stop_ = Failure::closed;
    if (closing_) {
      changed_.wait(lock, [this] { return closed_; });
      return true;
    }
    closing_ = true;
    changed_.notify_all();
    while (busy_ || !queue_.empty()) {
      changed_.wait_for(lock, kLook);
      if (stop_ == Failure::interrupted) continue;
      lock.unlock();
      if (interrupted && interrupted()) stop_ = Failure::interrupted;
      lock.lock();
    }
  }
  if (thread_.joinable()) thread_.join();
  dismiss_helpers();
  if (!broken_)
    for (int p = 0; p < view_.world(); ++p)
      if (p != view_.rank && view_.area[p] != nullptr)
        store_release(&view_.state(p, view_.rank).value, static_cast<std::uint32_t>(State::closed));
  peers_.close();
  segments_.close();
  areas_.clear();
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  completion_.notify_all();
  return true;
}

}  // namespace fastreduce
