// Python bindings of the CUDA target: pointers, counts and stream handles in; nothing is decided
// here.
#include <algorithm>

#include "bindings.h"
#include "cuda_communicator.h"
#include "device_topk.h"
#include "wire_tables.h"

namespace {

// A plan, and where its tables lie in the device's memory.
class DevicePlan {
 public:
  DevicePlan(int world, const std::vector<PlanTables::Row>& spans) : tables_(world, spans) {}

  const PlanTables& tables() const { return tables_; }
  void place(Address base) { base_ = reinterpret_cast<const char*>(base); }
  const char* base() const {
    if (base_ == nullptr) throw std::logic_error("the tables are not on the device");
    return base_;
  }

 private:
  PlanTables tables_;
  const char* base_ = nullptr;
};

// A Coding of which all but the numbers lies in the device's memory: `factor_at`, in place of
// `factor` if not 0, 4 pointers for every span, a byte for each or 0, and whether all is finite.
class DeviceCoding {
 public:
  DeviceCoding(std::shared_ptr<DevicePlan> plan, Address gradient, int dtype, int rank,
               double factor, Address factor_at, Address residuals, int residual_dtype,
               Address absent, std::uint64_t seed, std::uint32_t step, Address finite)
      : plan_(std::move(plan)) {
    const PlanTables& tables = plan_->tables();
    const char* const base = plan_->base();
    if (residuals == 0 || finite == 0)
      throw std::invalid_argument("residuals and finite: expected addresses, got 0");
    Coding& coding = launch_.coding;
    coding =
        coding_of(tables.plan_at(base), gradient, dtype, rank, factor, residual_dtype, seed, step);
    coding.residuals = reinterpret_cast<const Residuals*>(residuals);
    coding.absent = reinterpret_cast<const std::uint8_t*>(absent);
    coding.finite = reinterpret_cast<std::uint32_t*>(finite);
    launch_.messages = tables.messages_at(base);
    launch_.factor = reinterpret_cast<const float*>(factor_at);
  }

  // For a call that does all three.
  Address address() const { return reinterpret_cast<Address>(&launch_.coding); }

  void encode(Address to, Address stream) const { run(WireStep::encode, 0, 0, to, stream); }
  // The messages lie one after the other.
  void reduce(Address from, Address to, Address stream) const {
    const int rank = launch_.coding.rank;
    run(WireStep::reduce, from, plan_->tables().plan().bytes(rank), to, stream);
  }
  void decode(Address from, std::size_t stride, Address stream) const {
    run(WireStep::decode, from, stride, 0, stream);
  }
  // See device_topk.h.
  void select(SelectStep step, int digit, bool random, std::uint64_t k, float threshold,
              Address search, Address table, Address messages, Address stream) const {
    const Plan& plan = plan_->tables().plan();
    SelectLaunch launch;
    launch.step = step;
    launch.digit = digit;
    launch.coding = launch_.coding;
    launch.selection = {random, k, magnitude_of(threshold)};
    launch.search = reinterpret_cast<Search*>(search);
    launch.tiles = tiles_of(plan.span, plan.spans);
    launch.table = reinterpret_cast<std::uint32_t*>(table);
    launch.messages = reinterpret_cast<char*>(messages);
    cuda_driver().select(launch, stream);
  }

 private:
  void run(WireStep step, Address from, std::size_t stride, Address to, Address stream) const {
    const PlanTables& tables = plan_->tables();
    WireLaunch launch = launch_;
    launch.step = step;
    launch.from = reinterpret_cast<const char*>(from);
    launch.stride = stride;
    launch.to = reinterpret_cast<char*>(to);
    launch.runs = step == WireStep::reduce ? tables.plan().runs(launch.coding.rank)
                                           : tables.messages().back().runs;
    cuda_driver().wire(launch, stream);
  }

  std::shared_ptr<DevicePlan> plan_;
  WireLaunch launch_;
};

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "fastreduce's CUDA kernels; use the fastreduce package";

  translate_failures();

  m.attr("GRID_LIMIT") = kGridLimit;

  m.def("problem", [] { return cuda_driver().problem(); });
  m.def("resident_blocks", [] { return cuda_driver().resident_blocks(); });
  m.def("area_bytes", [](int world, int blocks, std::size_t slot_bytes, std::size_t stage_bytes,
                         std::size_t inbox_bytes) {
    return Layout{world, blocks, slot_bytes, stage_bytes, inbox_bytes}.bytes();
  });

  m.def(
      "convert",
      [](const std::vector<Address>& from, const std::vector<Address>& to,
         const std::vector<std::uint64_t>& counts, int from_dtype, int to_dtype, double scale,
         Address stream) {
        const auto launch = [&](std::size_t begin) {
          Moves moves;
          moves.from = static_cast<DType>(from_dtype);
          moves.to = static_cast<DType>(to_dtype);
          moves.scale = scale;
          std::size_t i = begin;
          while (i < counts.size() && add_move(moves, reinterpret_cast<const void*>(from.at(i)),
                                               reinterpret_cast<void*>(to.at(i)), counts[i]))
            ++i;
          cuda_driver().convert(moves, stream);
          return i;
        };
        for (std::size_t i = 0; i < counts.size();) i = launch(i);
      },
      py::call_guard<py::gil_scoped_release>());

  m.attr("NORM_WORDS") = sizeof(NormBins) / sizeof(std::uint64_t);
  m.def(
      "norm",
      [](int dtype, Address tensor, std::uint64_t begin, std::uint64_t end, Address ends,
         std::size_t sections, Address bins, Address stream) {
        NormLaunch launch;
        launch.dtype = static_cast<DType>(dtype);
        launch.tensor = reinterpret_cast<const void*>(tensor);
        launch.begin = begin;
        launch.end = end;
        launch.ends = reinterpret_cast<const std::uint64_t*>(ends);
        launch.sections = sections;
        launch.bins = reinterpret_cast<NormBins*>(bins);
        cuda_driver().norm(launch, stream);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("norms_of", [](Address bins, std::size_t sections, Address to) {
    const auto* from = reinterpret_cast<const NormBins*>(bins);
    std::transform(from, from + sections, reinterpret_cast<Norm*>(to), norm_of);
  });

  m.attr("SEARCH_BYTES") = sizeof(Search);
  m.attr("DIGITS") = kDigits;
  py::enum_<SelectStep>(m, "SelectStep")
      .value("count", SelectStep::count)
      .value("settle", SelectStep::settle)
      .value("tally", SelectStep::tally)
      .value("emit", SelectStep::emit)
      .value("find", SelectStep::find)
      .value("combine", SelectStep::combine);

  py::class_<DevicePlan, std::shared_ptr<DevicePlan>>(m, "WirePlan")
      .def(py::init<int, const std::vector<PlanTables::Row>&>(), py::arg("world"), py::arg("spans"))
      .def("message_bytes",
           [](const DevicePlan& self, int chunk) { return self.tables().plan().bytes(chunk); })
      .def("tiles",
           [](const DevicePlan& self) {
             const Plan& plan = self.tables().plan();
             return tiles_of(plan.span, plan.spans);
           })
      .def("image", [](const DevicePlan& self) { return py::bytes(self.tables().image()); })
      .def("place", &DevicePlan::place);

  py::class_<DeviceCoding>(m, "WireCoding")
      .def(py::init<std::shared_ptr<DevicePlan>, Address, int, int, double, Address, Address, int,
                    Address, std::uint64_t, std::uint32_t, Address>(),
           py::arg("plan"), py::arg("gradient"), py::arg("dtype"), py::arg("rank"),
           py::arg("factor"), py::arg("factor_at"), py::arg("residuals"), py::arg("residual_dtype"),
           py::arg("absent"), py::arg("seed"), py::arg("step"), py::arg("finite"))
      .def_property_readonly("address", &DeviceCoding::address)
      .def("encode", &DeviceCoding::encode, py::call_guard<py::gil_scoped_release>())
      .def("reduce", &DeviceCoding::reduce, py::call_guard<py::gil_scoped_release>())
      .def("decode", &DeviceCoding::decode, py::call_guard<py::gil_scoped_release>())
      .def("select", &DeviceCoding::select, py::arg("step"), py::arg("digit"), py::arg("random"),
           py::arg("k"), py::arg("threshold"), py::arg("search"), py::arg("table"),
           py::arg("messages"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());

  py::class_<CudaCommunicator>(m, "CudaCommunicator")
      .def(py::init([](int rank, const std::vector<Address>& areas, int blocks,
                       std::size_t slot_bytes, std::size_t stage_bytes, std::size_t inbox_bytes,
                       std::chrono::nanoseconds timeout, std::uint32_t first_epoch) {
             const Layout layout{static_cast<int>(areas.size()), blocks, slot_bytes, stage_bytes,
                                 inbox_bytes};
             return new CudaCommunicator(cuda_driver(), layout, rank, areas, timeout, first_epoch);
           }),
           py::arg("rank"), py::arg("areas"), py::kw_only(), py::arg("blocks"),
           py::arg("slot_bytes"), py::arg("stage_bytes"), py::arg("inbox_bytes"),
           py::arg("timeout"), py::arg("first_epoch"))
      .def("add_segment", &CudaCommunicator::add_segment)
      .def("remove_segment", &CudaCommunicator::remove_segment)
      .def("find",
           [](const CudaCommunicator& self, Address memory, std::size_t bytes, bool everywhere) {
             return self.find(reinterpret_cast<const void*>(memory), bytes, everywhere);
           })
      .def(
          "run",
          [](CudaCommunicator& self, std::uint64_t plan, Address in, Address out,
             std::uint64_t count, int root, double scale, double weight, int blocks,
             Address stream) {
            self.run(make_call(plan, count, root, scale, weight), reinterpret_cast<const void*>(in),
                     reinterpret_cast<void*>(out), blocks, stream);
          },
          py::call_guard<py::gil_scoped_release>())
      .def("check", &CudaCommunicator::check)
      .def("lose", &CudaCommunicator::lose, py::call_guard<py::gil_scoped_release>())
      .def("watch", &CudaCommunicator::watch)
      .def("close", &CudaCommunicator::close, py::arg("drain"),
           py::call_guard<py::gil_scoped_release>());
}
