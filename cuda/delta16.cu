// The delta rule in chunks of 16 tokens on tensor cores, for float32 and float16 and heads of up to
// 64 numbers. With e_j the error that token j finds, v_j - k_j (gate_j S_{j-1}), it is the linear
// rule with e for v:
//
//   e_i = v_i - d_i k_i S - sum_{j < i} (k_i . k_j) D_ij e_j
//   Y_i = d_i q_i S + sum_{j <= i} (q_i . k_j) D_ij e_j        S <- d_15 S + sum_j D_15,j k_j e_j^T
//
// with D_ij = beta_j gate_{j+1} ... gate_i and d_i = gate_0 ... gate_i (decay16.cuh). The first
// line is solved before S is known (delta16_prepare.cuh): e = W v - W d k S, a product and a sum.
//
// A block walks through the chunks of a sequence for one head. Its warps have roles: one has q, k
// and v copied; one or two make decays; some prepare chunks, by turns; one to four keep the state,
// 16 columns of V each, find errors and outputs, and advance it. From chunk to chunk only the
// state's warps wait for each other's products: two of them, one after the other, and no barrier
// between. A chunk lies in a stage and what was prepared of it in a slot until the state is past
// it.
#include "delta16_feed.cuh"
#include "delta16_prepare.cuh"
#include "delta16_state.cuh"

template <class S>
__device__ __forceinline__ void set_up(Shared<S>& shared) {
  for (int i = 0; i < S::kStages; i++) {
    shared.loaded[i].init(32);
    init_for_warps(shared.made[i], 1);
    init_for_warps(shared.free[i], S::kStateWarps);
  }
  for (int i = 0; i < S::kSlots; i++) {
    init_for_warps(shared.prepared[i], 1);
    init_for_warps(shared.used[i], S::kStateWarps);
  }
}

// grid: N * H blocks. block: Shape::kThreads.
template <class In, int K, int V, int kTeams, int kDecayWarps, int kStages, int kSlots,
          int kProducts, int kWide, bool kNormalise>
__global__ void __launch_bounds__(
    Shape<In, K, V, kTeams, kDecayWarps, kStages, kSlots, kProducts, kWide, kNormalise>::kThreads,
    1) delta16(const CallArgs a) {
  using S = Shape<In, K, V, kTeams, kDecayWarps, kStages, kSlots, kProducts, kWide, kNormalise>;
  DYNAMIC_SHARED(unsigned char, raw);
  auto& shared = *reinterpret_cast<Shared<S>*>(raw);
  // zeros beside what is copied and written: numbers written over them are zeros
  constexpr int kNumbers = S::kStages * S::kStage + S::kSlots * int(sizeof(Slot<S>) / 4);
  for (int i = 4 * threadIdx.x; i < kNumbers; i += 4 * S::kThreads)
    *reinterpret_cast<Run<float, 4>*>(shared.stages[0] + i) = {};
  if (threadIdx.x == 0) shared.item = find_item(a);
  if (threadIdx.x == 32) set_up(shared);
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const Role role = find_role<S>(threadIdx.x / 32);
  if (role.job == kState) {
    keep_state(a, shared, role.index, lane);
    if (a.cu_seqlens && shared.item.n == a.N - 1)
      clear_rest<S>(a, shared.item, 32 * role.index + lane);
  } else if (role.job == kPreparations) {
    prepare(shared, role.index, lane);
  } else if (role.job == kDecays) {
    make_decays(a, shared, role.index, lane);
  } else {
    copy(a, shared, lane);
  }
}
