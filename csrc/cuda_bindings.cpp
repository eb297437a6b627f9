// Python bindings of the CUDA target: pointers, counts and stream handles in; nothing is decided
// here.
#include "bindings.h"
#include "cuda_communicator.h"

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
