// The protocols as CUDA kernels. They are compiled once, over functions that each do one thing to
// memory for one element type and operation; a call of one moves a whole piece.
#include <cuda_runtime.h>

#include "cuda_block.h"
#include "cuda_error.h"

namespace fastreduce {
namespace {

// visit(arithmetic) for the types of the call.
template <class Visit>
__device__ __forceinline__ auto visit_arithmetic(const Visit& visit) {
  const Call& call = shared.launch->job.call;
  return visit_types(call.dtype, call.op, [&](auto type) {
    using T = typename decltype(type)::Element;
    using O = typename decltype(type)::Operation;
    const auto scale = factors_of(shared, static_cast<const ScaleOf<T>*>(nullptr));
    return visit(TypedArithmetic<T, O>(scale, shared.launch->view.rank));
  });
}

// Each of these is one function, for all types, that is not inlined: a kernel calls it in many
// places. Pointers come in the block's tables, and arguments are few, so that all are in registers.
__device__ __noinline__ void reduce_tables(int stores, int count, std::size_t n) {
  visit_arithmetic([&](const auto& typed) {
    CudaBlock block;
    typed.reduce(
        block, [](int k) { return shared.to[k]; }, stores, [](int k) { return shared.from[k]; },
        count, n);
  });
}

__device__ __noinline__ void open_partial(char* partial, const char* own, std::size_t n) {
  visit_arithmetic([&](const auto& typed) {
    CudaBlock block;
    typed.open_partial(block, partial, own, n);
  });
}

__device__ __noinline__ void add_partial(char* partial, const char* arrived, const char* own,
                                         std::size_t n) {
  visit_arithmetic([&](const auto& typed) {
    CudaBlock block;
    typed.add_partial(block, partial, arrived, own, n);
  });
}

__device__ __noinline__ void close_partial(char* kept, char* sent, const char* arrived,
                                           const char* own, std::size_t n) {
  visit_arithmetic([&](const auto& typed) {
    CudaBlock block;
    typed.close_partial(block, kept, sent, arrived, own, n);
  });
}

class CudaArithmetic {
 public:
  __device__ std::size_t item_bytes() const {
    return fastreduce::item_bytes(shared.launch->job.call.dtype);
  }
  __device__ std::size_t partial_bytes() const {
    switch (shared.launch->job.call.dtype) {
      case DType::float64:
      case DType::int32:
      case DType::int64:
        return 8;
      default:
        return 4;
    }
  }
  __device__ std::size_t grain() const { return 64 / item_bytes(); }

  template <class To, class From>
  __device__ void reduce(CudaBlock& block, const To& to, int stores, const From& from, int count,
                         std::size_t n) const {
    block.all(true);
    for (int k = block.thread(); k < stores; k += block.threads()) shared.to[k] = to(k);
    for (int k = block.thread(); k < count; k += block.threads()) shared.from[k] = from(k);
    block.all(true);
    reduce_tables(stores, count, n);
  }

  template <class From>
  __device__ bool reduce_lines(CudaBlock& block, char* out, const char* own, const From& from,
                               int rank, int count, Range part, std::size_t bytes,
                               std::uint32_t epoch) const {
    return visit_arithmetic([&](const auto& typed) {
      return typed.reduce_lines(block, out, own, from, rank, count, part, bytes, epoch);
    });
  }

  __device__ void open_partial(CudaBlock&, char* partial, const char* own, std::size_t n) const {
    fastreduce::open_partial(partial, own, n);
  }
  __device__ void add_partial(CudaBlock&, char* partial, const char* arrived, const char* own,
                              std::size_t n) const {
    fastreduce::add_partial(partial, arrived, own, n);
  }
  __device__ void close_partial(CudaBlock&, char* kept, char* sent, const char* arrived,
                                const char* own, std::size_t n) const {
    fastreduce::close_partial(kept, sent, arrived, own, n);
  }

  // Whole packs. The factors are applied to the sum that the switch gives, in its type.
  __device__ void reduce_everywhere(CudaBlock& block, char* everywhere, std::size_t n) const;
};

// A pack of sums: what a multimem load gives, in the words that it gives it in.
struct Words {
  std::uint32_t word[4];
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FR_MULTIMEM 1
template <class T>
__device__ Words multimem_load(const char* at) {
  Words w;
  if constexpr (std::is_same<T, float>::value)
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
                 : "l"(at)
                 : "memory");
  else if constexpr (std::is_same<T, Half>::value)
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
        : "l"(at)
        : "memory");
  else
    asm volatile(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
        : "l"(at)
        : "memory");
  return w;
}

__device__ void multimem_store(char* at, const Words& w) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at),
               "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3])
               : "memory");
}

// Peers' own addresses and the switch's are two ways to the same memory.
__device__ void order_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

template <class T>
__device__ void reduce_by_switch(CudaBlock& block, char* everywhere, std::size_t n) {
  constexpr int kItems = kItemsOf<T>;
  // The ranks' factors are one, see differ().
  const float factor = shared.single[0] * static_cast<float>(shared.after);
  const std::size_t packs = n / kItems;
  const std::size_t stride = block.threads();
  for (std::size_t first = block.thread(); first < packs; first += kInFlight * stride) {
    Words in[kInFlight];
    FR_UNROLL
    for (int a = 0; a < kInFlight; ++a)
      if (first + a * stride < packs)
        in[a] = multimem_load<T>(everywhere + (first + a * stride) * kPackBytes);
    FR_UNROLL
    for (int a = 0; a < kInFlight; ++a) {
      if (first + a * stride >= packs) break;
      if (factor != 1) {
        Items<T, kItems> items;
        std::memcpy(&items, &in[a], sizeof items);
        FR_UNROLL
        for (int j = 0; j < kItems; ++j)
          items.item[j] = Element<T>::store(Factor<float>{factor}(Element<T>::load(items.item[j])));
        std::memcpy(&in[a], &items, sizeof items);
      }
      multimem_store(everywhere + (first + a * stride) * kPackBytes, in[a]);
    }
  }
}
#endif

__device__ void CudaArithmetic::reduce_everywhere([[maybe_unused]] CudaBlock& block,
                                                  [[maybe_unused]] char* everywhere,
                                                  [[maybe_unused]] std::size_t n) const {
#if defined(FR_MULTIMEM)
  order_aliases();
  switch (shared.launch->job.call.dtype) {
    case DType::float32:
      reduce_by_switch<float>(block, everywhere, n);
      break;
    case DType::float16:
      reduce_by_switch<Half>(block, everywhere, n);
      break;
    default:
      reduce_by_switch<BFloat16>(block, everywhere, n);
  }
  order_aliases();
#endif
}

FR_WAITING_KERNEL reduction(const __grid_constant__ Launch launch) {
  run_call(CudaBlock(), launch, [&](CudaBlock& block, std::uint32_t epoch) {
    reduce_call(block, launch, CudaArithmetic(), epoch);
  });
}

FR_WAITING_KERNEL ring_reduction(const __grid_constant__ Launch launch) {
  run_call(CudaBlock(), launch, [&](CudaBlock& block, std::uint32_t epoch) {
    ring_call(block, launch, CudaArithmetic(), epoch);
  });
}

FR_WAITING_KERNEL small_reduction(const __grid_constant__ Launch launch) {
  run_call(CudaBlock(), launch, [&](CudaBlock& block, std::uint32_t epoch) {
    low_latency_call(block, launch, CudaArithmetic(), epoch);
  });
}

FR_WAITING_KERNEL transfer(const __grid_constant__ Launch launch) {
  run_call(CudaBlock(), launch,
           [&](CudaBlock& block, std::uint32_t epoch) { transfer_call(block, launch, epoch); });
}

Kernel kernel_of(const Call& call) {
  if (call.kind != Kind::all_reduce && call.kind != Kind::reduce_scatter) return transfer;
  if (call.algorithm == Algorithm::encoded) return encoded_kernel();
  if (call.algorithm == Algorithm::low_latency) return small_reduction;
  if (call.algorithm == Algorithm::ring) return ring_reduction;
  return reduction;
}

}  // namespace

int resident_blocks_of_kernels() {
  int device = 0;
  int processors = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  int least = kGridLimit;
  for (const Kernel kernel :
       {reduction, ring_reduction, small_reduction, transfer, encoded_kernel()}) {
    int each = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kBlockThreads, 0));
    least = each * processors < least ? each * processors : least;
  }
  return least;
}

// All blocks of the launch fit on the device at once, or it is refused. (Other kernels there end;
// of other waiting kernels, policy leaves room for one more.)
void launch_kernel(const Launch& launch, int blocks, cudaStream_t stream) {
  cudaLaunchAttribute together;
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kBlockThreads);
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel_of(launch.job.call), launch));
}

}  // namespace fastreduce
