// Python bindings: pointers, counts and enum numbers in; nothing is decided here.
#include "bindings.h"

#include <algorithm>

#include "host_communicator.h"
#include "topk.h"
#include "wire_tables.h"

namespace {

// True if a Python signal handler raised; the exception stays set for the caller's return.
bool check_signals() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// What `work` returns, run without the interpreter's lock. What a signal handler raised meanwhile
// comes first.
template <class F>
auto uninterrupted(F work) {
  const auto raise = [] {
    if (PyErr_Occurred()) throw py::error_already_set();
  };
  try {
    const auto result = [&] {
      py::gil_scoped_release release;
      return work();
    }();
    raise();
    return result;
  } catch (...) {
    raise();
    throw;
  }
}

py::tuple as_tuple(const Account& account) {
  return py::make_tuple(account.begin.time_since_epoch().count(),
                        account.end.time_since_epoch().count(), account.waited.count(),
                        account.latest, account.latest_wait.count());
}

// Memory of one rank that its peers can map. Buffer protocol: a tensor made from it keeps it.
class Allocation {
 public:
  Allocation(std::shared_ptr<HostCommunicator> owner, std::size_t bytes)
      : owner_(owner), bytes_(bytes) {
    const Descriptor fd = create_segment(bytes);
    mapping_ = Mapping(fd.get(), bytes);
    id_ = owner->segments().add(fd.get(), mapping_.data(), bytes);
    owner->segments().add_allocation(id_, mapping_.data());
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation() {
    const auto owner = owner_.lock();
    if (owner == nullptr || owner->forked()) return;
    owner->segments().remove_allocation(mapping_.data());
    owner->segments().remove(id_);
  }
  py::buffer_info info() const {
    return py::buffer_info(mapping_.data(), 1, py::format_descriptor<std::uint8_t>::format(),
                           static_cast<py::ssize_t>(bytes_));
  }

 private:
  std::weak_ptr<HostCommunicator> owner_;
  Mapping mapping_;
  std::size_t bytes_;
  int id_ = -1;
};

// A Coding and what it points to. `residuals` is the address of 4 pointers for every span, `absent`
// of a byte for each, or 0.
class WireCoding {
 public:
  WireCoding(std::shared_ptr<PlanTables> plan, Address gradient, int dtype, int rank, double factor,
             Address residuals, int residual_dtype, Address absent, std::uint64_t seed,
             std::uint32_t step, bool lands)
      : plan_(std::move(plan)), residuals_(plan_->plan().spans) {
    coding_ = coding_of(plan_->plan(), gradient, dtype, rank, factor, residual_dtype, seed, step);
    if (residuals != 0)
      std::memcpy(residuals_.data(), reinterpret_cast<const void*>(residuals),
                  residuals_.size() * sizeof(Residuals));
    coding_.residuals = residuals_.data();
    if (absent != 0) {
      const auto* first = reinterpret_cast<const std::uint8_t*>(absent);
      absent_.assign(first, first + coding_.plan.spans);
      coding_.absent = absent_.data();
    }
    coding_.finite = &finite_;
    coding_.lands = lands;
  }
  WireCoding(const WireCoding&) = delete;
  WireCoding& operator=(const WireCoding&) = delete;

  const Coding& coding() const { return coding_; }
  std::vector<const char*> messages(const std::vector<Address>& from) const {
    std::vector<const char*> messages;
    for (int p = 0; p < coding_.plan.world; ++p)
      messages.push_back(reinterpret_cast<const char*>(from.at(p)));
    return messages;
  }
  bool finite() const { return load_acquire(&finite_) != 0; }

 private:
  std::shared_ptr<PlanTables> plan_;
  std::vector<Residuals> residuals_;
  std::vector<std::uint8_t> absent_;
  std::uint32_t finite_ = 1;
  Coding coding_;
};

// What calls of one rank have measured, section by section.
class Norms {
 public:
  using Ends = std::vector<std::uint64_t>;

  Norms(Ends ends, int blocks)
      : ends_(std::move(ends)), blocks_(blocks), norms_(ends_.size() * blocks) {
    if (blocks < 1 || blocks > kMaxBlocks) throw std::invalid_argument("blocks: out of range");
    if (ends_.empty() || !std::is_sorted(ends_.begin(), ends_.end()))
      throw std::invalid_argument("ends: expected at least one, in ascending order");
    measure_ = {ends_.data(), ends_.size(), norms_.data()};
  }
  Norms(const Norms&) = delete;
  Norms& operator=(const Norms&) = delete;

  const Measure& measure() const { return measure_; }
  int blocks() const { return blocks_; }
  // All blocks' together, in the first one's place.
  const std::vector<Norm>& merge() {
    for (std::size_t i = ends_.size(); i < norms_.size(); ++i) {
      fastreduce::merge(norms_[i % ends_.size()], norms_[i]);
      norms_[i] = {};
    }
    return norms_;
  }
  void add(const Norm* others) {
    for (std::size_t s = 0; s < ends_.size(); ++s) fastreduce::merge(norms_[s], others[s]);
  }
  void clear() { std::fill(norms_.begin(), norms_.end(), Norm()); }
  std::size_t sections() const { return ends_.size(); }

 private:
  Ends ends_;
  int blocks_;
  std::vector<Norm> norms_;
  Measure measure_;
};

// An Update and its runs: where gradient, parameter, copy in the accumulator's type, moment and
// square lie (0: none), how many elements there are, and rates.
class UpdateOf {
 public:
  using Row = std::tuple<Address, Address, Address, Address, Address, std::uint64_t, Rates>;

  explicit UpdateOf(const std::vector<Row>& rows) {
    const auto at = [](Address address) { return reinterpret_cast<void*>(address); };
    for (const auto& [gradient, parameter, master, moment, square, count, rates] : rows)
      runs_.push_back(
          {{at(gradient), at(parameter), at(master), at(moment), at(square)}, count, rates});
    std::sort(runs_.begin(), runs_.end(),
              [](const auto& a, const auto& b) { return a.at.gradient < b.at.gradient; });
    update_.run = runs_.data();
    update_.runs = runs_.size();
  }
  UpdateOf(const UpdateOf&) = delete;
  UpdateOf& operator=(const UpdateOf&) = delete;

  const Update& update() const { return update_; }

 private:
  std::vector<Update::Run> runs_;
  Update update_;
};

// Shares and what they point to.
class SharesOf {
 public:
  using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

  // Of every rank; elements.
  explicit SharesOf(const std::vector<Pairs>& ranks) : first_(1) {
    for (const Pairs& pairs : ranks) {
      for (const auto& [begin, end] : pairs) {
        if (begin > end || (ranges_.size() != first_.back() && begin < ranges_.back().end))
          throw std::invalid_argument(
              "ranges: expected them in ascending order, and not to overlap");
        ranges_.push_back({begin, end});
      }
      first_.push_back(ranges_.size());
    }
    shares_ = {ranges_.data(), first_.data()};
  }
  SharesOf(const SharesOf&) = delete;
  SharesOf& operator=(const SharesOf&) = delete;

  const Shares& shares() const { return shares_; }

 private:
  std::vector<Range> ranges_;
  std::vector<std::size_t> first_;
  Shares shares_;
};

Use use_of(const HostCommunicator& communicator, Address shares, Address norms, Address update) {
  Use use;
  if (shares != 0) use.shares = &reinterpret_cast<const SharesOf*>(shares)->shares();
  if (norms != 0) {
    const auto& counts = *reinterpret_cast<const Norms*>(norms);
    if (counts.blocks() < communicator.blocks())
      throw std::invalid_argument("norms: made for fewer threads than the communicator has");
    use.measure = &counts.measure();
  }
  if (update != 0) use.update = &reinterpret_cast<const UpdateOf*>(update)->update();
  return use;
}

// Why a communicator could not be made, as far as it is not what a signal handler raised.
struct CannotShare : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "fastreduce's kernels and shared memory; use the fastreduce package";

  translate_failures();

  py::register_exception<CannotShare>(m, "CannotShareError", PyExc_RuntimeError);

  m.def(
      "instruction_set", [] { return kernels().name; },
      "Name of the instruction set that the kernels use on this processor: ``baseline``,\n"
      "``avx2`` or ``avx512``. The environment variable FASTREDUCE_ISA names a lower one.");
  m.def("plan", &plan);
  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("MAX_BLOCKS") = kMaxBlocks;

  const auto define_bucket = [&m](const char* name, BucketKernel Kernels::* kernel) {
    m.def(
        name,
        [kernel](const std::vector<Address>& tensors, const std::vector<std::size_t>& counts,
                 const std::vector<std::size_t>& offsets, Address flat, int tensor_dtype,
                 int flat_dtype, double scale) {
          std::vector<Piece> pieces(tensors.size());
          for (std::size_t i = 0; i < tensors.size(); ++i)
            pieces[i] = {reinterpret_cast<void*>(tensors[i]), counts.at(i), offsets.at(i)};
          const Watch nobody;
          Progress progress;
          HostBlock block(nobody, progress, 0, 1);
          (kernels().*kernel)(block, static_cast<DType>(tensor_dtype),
                              static_cast<DType>(flat_dtype), reinterpret_cast<void*>(flat),
                              pieces.data(), pieces.size(), scale);
        },
        py::call_guard<py::gil_scoped_release>());
  };
  define_bucket("pack", &Kernels::pack);
  define_bucket("unpack", &Kernels::unpack);

  py::class_<PlanTables, std::shared_ptr<PlanTables>>(m, "WirePlan")
      .def(py::init<int, const std::vector<PlanTables::Row>&, const std::vector<int>&,
                    std::size_t>(),
           py::arg("world"), py::arg("spans"), py::arg("servers") = std::vector<int>(),
           py::arg("grain") = 0)
      .def("message_bytes",
           [](const PlanTables& self, int chunk) { return self.plan().bytes(chunk); });

  py::class_<WireCoding, std::shared_ptr<WireCoding>>(m, "WireCoding")
      .def(py::init<std::shared_ptr<PlanTables>, Address, int, int, double, Address, int, Address,
                    std::uint64_t, std::uint32_t, bool>(),
           py::arg("plan"), py::arg("gradient"), py::arg("dtype"), py::arg("rank"),
           py::arg("factor"), py::arg("residuals"), py::arg("residual_dtype"), py::arg("absent"),
           py::arg("seed"), py::arg("step"), py::arg("lands") = false)
      .def_property_readonly(
          "address",
          [](const WireCoding& self) { return reinterpret_cast<Address>(&self.coding()); })
      .def_property_readonly("finite", &WireCoding::finite)
      .def(
          "encode",
          [](const WireCoding& self, int chunk, Address to) {
            kernels().encode(self.coding(), chunk, reinterpret_cast<char*>(to));
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "reduce",
          [](const WireCoding& self, const std::vector<Address>& from, Address to) {
            kernels().reduce(self.coding(), self.messages(from).data(),
                             reinterpret_cast<char*>(to));
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "decode",
          [](const WireCoding& self, int chunk, Address from) {
            kernels().decode(self.coding(), chunk, reinterpret_cast<const char*>(from));
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "select",
          [](const WireCoding& self, bool random, std::uint64_t k, float threshold,
             std::uint32_t expected, Address to) {
            const Selection selection{random, k, magnitude_of(threshold)};
            return kernels().select(self.coding(), selection, expected,
                                    reinterpret_cast<char*>(to));
          },
          py::arg("random"), py::arg("k"), py::arg("threshold"), py::arg("expected"), py::arg("to"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "combine",
          [](const WireCoding& self, std::uint64_t k, const std::vector<Address>& from) {
            kernels().combine(self.coding(), k, self.messages(from).data());
          },
          py::call_guard<py::gil_scoped_release>());

  py::class_<Norms>(m, "Norms")
      .def(py::init<Norms::Ends, int>(), py::arg("ends"), py::arg("blocks") = 1)
      .def_property_readonly("address",
                             [](const Norms& self) { return reinterpret_cast<Address>(&self); })
      .def("clear", &Norms::clear)
      .def(
          "measure",
          [](const Norms& self, int rank, int world, int dtype, Address tensor, std::size_t count) {
            kernels().measure(self.measure(), rank, world, static_cast<DType>(dtype),
                              reinterpret_cast<const void*>(tensor), count);
          },
          py::call_guard<py::gil_scoped_release>())
      .def("save",
           [](Norms& self, Address to) {
             std::memcpy(reinterpret_cast<void*>(to), self.merge().data(),
                         self.sections() * sizeof(Norm));
           })
      .def("add", [](Norms& self, Address from) { self.add(reinterpret_cast<const Norm*>(from)); })
      .def("values", [](Norms& self) {
        py::list values;
        const std::vector<Norm>& norms = self.merge();
        for (std::size_t s = 0; s < self.sections(); ++s) {
          const Norm& norm = norms[s];
          values.append(py::make_tuple(norm.part[0], norm.part[1], norm.part[2], norm.top,
                                       bits_double(norm.most), norm.nonfinite));
        }
        return values;
      });
  m.attr("NORM_BYTES") = sizeof(Norm);
  m.attr("NORM_BITS") = Norm::kBits;
  m.attr("NORM_HIGHEST") = Norm::kHighest;

  py::class_<Rates>(m, "Rates")
      .def(py::init([](int rule) {
             Rates rates;
             rates.rule = static_cast<Rule>(rule);
             return rates;
           }),
           py::arg("rule"))
      .def_readwrite("maximize", &Rates::maximize)
      .def_readwrite("first", &Rates::first)
      .def_readwrite("nesterov", &Rates::nesterov)
      .def_readwrite("scale", &Rates::scale)
      .def_readwrite("rate", &Rates::rate)
      .def_readwrite("decay", &Rates::decay)
      .def_readwrite("momentum", &Rates::momentum)
      .def_readwrite("dampening", &Rates::dampening)
      .def_readwrite("beta1", &Rates::beta1)
      .def_readwrite("beta2", &Rates::beta2)
      .def_readwrite("correction2", &Rates::correction2)
      .def_readwrite("eps", &Rates::eps);
  py::class_<UpdateOf>(m, "Update")
      .def(py::init<const std::vector<UpdateOf::Row>&>())
      .def_property_readonly("address",
                             [](const UpdateOf& self) { return reinterpret_cast<Address>(&self); })
      .def(
          "run",
          [](const UpdateOf& self, int dtype) {
            kernels().update(self.update(), static_cast<DType>(dtype));
          },
          py::call_guard<py::gil_scoped_release>());

  py::class_<SharesOf>(m, "Shares")
      .def(py::init<const std::vector<SharesOf::Pairs>&>())
      .def_property_readonly("address",
                             [](const SharesOf& self) { return reinterpret_cast<Address>(&self); });

  py::class_<Listener>(m, "Listener")
      .def(py::init<>())
      .def_property_readonly(
          "address", [](const Listener& listener) { return py::bytes(listener.address()); });

  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("done", &Work::done)
      .def_property_readonly("total", &Work::total)
      .def_property_readonly("account", [](const Work& work) { return as_tuple(work.account()); })
      .def(
          "wait",
          [](Work& work, Clock::duration timeout) {
            bool finished = false;
            try {
              py::gil_scoped_release release;
              finished = work.wait(timeout, check_signals);
            } catch (...) {
              if (PyErr_Occurred()) throw py::error_already_set();
              throw;
            }
            if (PyErr_Occurred()) throw py::error_already_set();
            return finished;
          },
          py::arg("timeout"));

  py::class_<Allocation>(m, "Allocation", py::buffer_protocol())
      .def(py::init<std::shared_ptr<HostCommunicator>, std::size_t>(),
           py::call_guard<py::gil_scoped_release>())
      .def_buffer([](const Allocation& allocation) { return allocation.info(); });

  py::class_<HostCommunicator, std::shared_ptr<HostCommunicator>>(m, "HostCommunicator")
      .def(py::init(
               [](const Listener& listener, int rank, const std::vector<std::string>& addresses,
                  const std::vector<int>& processes, const std::string& token,
                  Clock::duration timeout, Clock::duration connect_timeout, int blocks,
                  std::size_t slot_bytes, std::size_t stage_bytes, std::size_t block_bytes,
                  std::pair<std::int64_t, std::int64_t> foreground_ns,
                  std::pair<std::int64_t, std::int64_t> background_ns, std::uint32_t first_epoch) {
                 const auto patience = [](std::pair<std::int64_t, std::int64_t> ns) {
                   return Patience{std::chrono::nanoseconds(ns.first),
                                   std::chrono::nanoseconds(ns.second)};
                 };
                 Options options;
                 options.timeout = timeout;
                 options.connect_timeout = connect_timeout;
                 options.blocks = blocks;
                 options.slot_bytes = slot_bytes;
                 options.stage_bytes = stage_bytes;
                 options.block_bytes = block_bytes;
                 options.foreground = patience(foreground_ns);
                 options.background = patience(background_ns);
                 options.first_epoch = first_epoch;
                 // A forked child has none of the threads: it leaves its copy alone.
                 return uninterrupted([&] {
                   try {
                     return std::shared_ptr<HostCommunicator>(
                         new HostCommunicator(listener, rank, addresses, processes, token, options,
                                              check_signals),
                         [](HostCommunicator* communicator) {
                           if (!communicator->forked()) delete communicator;
                         });
                   } catch (const std::exception& error) {
                     throw CannotShare(error.what());
                   }
                 });
               }),
           py::arg("listener"), py::arg("rank"), py::arg("addresses"), py::arg("processes"),
           py::arg("token"), py::kw_only(), py::arg("timeout"), py::arg("connect_timeout"),
           py::arg("blocks"), py::arg("slot_bytes"), py::arg("stage_bytes"), py::arg("block_bytes"),
           py::arg("foreground_ns"), py::arg("background_ns"), py::arg("first_epoch"))
      .def("run",
           [](HostCommunicator& self, std::uint64_t plan, Address in, Address out,
              std::uint64_t count, int root, double scale, double weight, int segment,
              Address shares, Address norms, Address update) {
             Call call = make_call(plan, count, root, scale, weight);
             call.segment = segment;
             uninterrupted([&] {
               self.run(call, reinterpret_cast<const void*>(in), reinterpret_cast<void*>(out),
                        check_signals, nullptr, use_of(self, shares, norms, update));
               return true;
             });
           })
      .def("sum_norms",
           [](HostCommunicator& self, std::uint64_t plan, int world,
              const std::vector<std::pair<Norms*, Norms*>>& norms, double told) {
             // Every rank's counts of all norms, and what it tells.
             std::vector<std::size_t> begins{0};
             for (const auto& [own, total] : norms)
               begins.push_back(begins.back() + own->sections() * sizeof(Norm));
             const std::size_t bytes = begins.back() + sizeof told;
             std::vector<char> mine(bytes), all(bytes * static_cast<std::size_t>(world));
             for (std::size_t k = 0; k < norms.size(); ++k)
               std::memcpy(mine.data() + begins[k], norms[k].first->merge().data(),
                           begins[k + 1] - begins[k]);
             std::memcpy(mine.data() + begins.back(), &told, sizeof told);
             const Call call = make_call(plan, bytes, 0, 1, kOrdinary);
             uninterrupted([&] {
               self.run(call, mine.data(), all.data(), check_signals, nullptr, {});
               return true;
             });
             for (const auto& [own, total] : norms) total->clear();
             std::vector<double> notes;
             for (int p = 0; p < world; ++p) {
               const char* const from = all.data() + static_cast<std::size_t>(p) * bytes;
               for (std::size_t k = 0; k < norms.size(); ++k)
                 norms[k].second->add(reinterpret_cast<const Norm*>(from + begins[k]));
               std::memcpy(&notes.emplace_back(), from + begins.back(), sizeof told);
             }
             return notes;
           })
      .def("run_told",
           [](HostCommunicator& self, std::uint64_t plan, Address in, Address out,
              std::uint64_t count, int root, double scale, double weight, int segment,
              Address shares, Address norms, Address update) {
             Call call = make_call(plan, count, root, scale, weight);
             call.segment = segment;
             Account account;
             const double total = uninterrupted([&] {
               return self.run(call, reinterpret_cast<const void*>(in),
                               reinterpret_cast<void*>(out), check_signals, &account,
                               use_of(self, shares, norms, update));
             });
             return std::make_pair(total, as_tuple(account));
           })
      .def("submit",
           [](HostCommunicator& self, std::uint64_t plan, Address in, Address out,
              std::uint64_t count, int root, double scale, double weight, int segment,
              Address shares, Address norms, Address update, std::int64_t notify) {
             Call call = make_call(plan, count, root, scale, weight);
             call.segment = segment;
             py::gil_scoped_release release;
             return self.submit(call, reinterpret_cast<const void*>(in),
                                reinterpret_cast<void*>(out), notify,
                                use_of(self, shares, norms, update));
           })
      .def("record", &HostCommunicator::record)
      .def_property_readonly("blocks", &HostCommunicator::blocks)
      .def("next_completed", &HostCommunicator::next_completed,
           py::call_guard<py::gil_scoped_release>())
      .def("add_segment",
           [](HostCommunicator& self, int fd, Address base, std::size_t bytes) {
             return self.segments().add(fd, reinterpret_cast<const void*>(base), bytes);
           })
      .def("remove_segment", [](HostCommunicator& self, int id) { self.segments().remove(id); })
      .def("is_allocation",
           [](HostCommunicator& self, Address base) {
             self.refuse_child();
             return self.segments().is_allocation(reinterpret_cast<const void*>(base));
           })
      .def(
          "close",
          [](HostCommunicator& self, bool drain) {
            return uninterrupted([&] { return self.close(drain, check_signals); });
          },
          py::arg("drain"))
      .def("refuse_child", &HostCommunicator::refuse_child)
      .def_property_readonly("forked", &HostCommunicator::forked);
}
