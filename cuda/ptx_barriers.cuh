// Part of ptx.cuh: barriers in shared memory, and copies of tiles by the copy engine of sm_90.
#pragma once

// A copy engine's view of an array, made by cuTensorMapEncodeTiled on the host.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// A barrier in shared memory. Phases end one after the other; wait(n % 2) returns once phase n
// ended.
struct Barrier {
  unsigned long long word;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile(
        "{\n.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];\n}" ::"r"(shared_address(this))
        : "memory");
  }
  // One arrival, made once all copies that this thread has begun are there.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(this))
                 : "memory");
  }
  // One arrival, and as many bytes of copies to come before the phase ends.
  __device__ __forceinline__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void wait(unsigned parity) {
    unsigned done;
    do {
      asm volatile(
          "{\n.reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
          "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
          "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(shared_address(this)), "r"(parity)
          : "memory");
    } while (!done);
  }
};

// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes this thread's writes to shared memory known to the copy engine and to wgmma.
__device__ __forceinline__ void fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Barrier among kThreads threads of a block; ids from 1 on.
template <int kThreads>
__device__ __forceinline__ void sync_threads(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// A tile at (col, head, token, batch) into shared memory; what lies outside the array reads as 0.
__device__ __forceinline__ void load_tile(void* to, const TensorMap& map, int col, int h, int t,
                                          int b, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(col), "r"(h), "r"(t), "r"(b)
      : "memory");
}
// The other way; what lies outside the array is not written.
__device__ __forceinline__ void store_tile(const TensorMap& map, const void* from, int col, int h,
                                           int t, int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared_address(from)), "r"(col), "r"(h), "r"(t), "r"(b)
      : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until this thread's stores have read shared memory.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
