// What the bindings of all targets have in common: a call as Python names it, and failures as its
// exceptions.
#pragma once

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "signal.h"

namespace py = pybind11;
using namespace fastreduce;

namespace {

// What stays the same in calls alike: kind, dtype, op and algorithm, a byte each, and the shape.
inline std::uint64_t plan(int kind, int dtype, int op, int algorithm, std::uint32_t shape) {
  const auto codes = static_cast<std::uint32_t>(kind | dtype << 8 | op << 16 | algorithm << 24);
  return static_cast<std::uint64_t>(shape) << 32 | codes;
}

inline Call make_call(std::uint64_t plan, std::uint64_t count, int root, double scale,
                      double weight) {
  Call call;
  call.kind = static_cast<Kind>(plan & 0xff);
  call.dtype = static_cast<DType>(plan >> 8 & 0xff);
  call.op = static_cast<Op>(plan >> 16 & 0xff);
  call.algorithm = static_cast<Algorithm>(plan >> 24 & 0xff);
  call.shape = static_cast<std::uint32_t>(plan >> 32);
  call.root = root;
  call.count = count;
  call.scale = scale;
  call.weight = weight;
  return call;
}

inline void raise_failure(const CallFailed& failed) {
  const FailureRecord& r = failed.record;
  const py::object error =
      py::module_::import("fastreduce.errors")
          .attr("from_record")(failed.rank, static_cast<int>(r.failure), static_cast<int>(r.field),
                               static_cast<int>(r.kind), static_cast<int>(r.phase), r.written,
                               r.ran, r.rank, r.peer, r.epoch, r.expected, r.seen);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

inline void translate_failures() {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const CallFailed& failed) {
      raise_failure(failed);
    }
  });
}

}  // namespace
