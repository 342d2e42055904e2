// The state before each chunk, and the gradient of the state after it: chunk by chunk, with one
// barrier for each. While a chunk is multiplied the next ones are on their way: whole vectors of
// bfloat16 to shared memory as they are, all else through registers, where keys get their weights.
#pragma once
#include "grad_chunk.cuh"

// How the state is laid over warps, kCols columns of V for a block.
template <class In, int K, int kCols, bool kWide>
struct StatesShape {
  using F = typename Factors<In>::Type;
  static constexpr int kKeys = (K + 15) / 16 * 16, kRowTiles = kKeys / 16;
  static constexpr int kKeyRow = F::template kRow<kKeys>, kValueRow = F::template kRow<kCols>;
  static constexpr int kRowWarps = kRowTiles % 4 == 0 ? 4 : (kRowTiles % 2 == 0 ? 2 : 1);
  static constexpr int kColWarps = 8 / kRowWarps < kCols / 16 ? 8 / kRowWarps : kCols / 16;
  static constexpr int kWarps = kRowWarps * kColWarps, kThreads = 32 * kWarps;
  static constexpr int kTilesDown = kRowTiles / kRowWarps;
  static constexpr int kTilesAcross = kCols / 8 / kColWarps;
  static constexpr bool kCopied = kWide && F::kCount == 1;
  static constexpr int kStages = kCopied ? 4 : 2;                // chunks at hand
  static constexpr int kStage = kChunk * (kKeyRow + kValueRow);  // numbers of a chunk
  // Each warp weighs the tokens of one chunk in kWarps, all warps at once: the gates of so many
  // chunks are made ready together, as many chunks ahead.
  static constexpr int kAhead = kWarps > 1 ? kWarps : 2, kWeights = 2 * kAhead;
  static_assert(kCols % 16 == 0 && kTilesAcross % 2 == 0, "a warp's columns are pairs of tiles");
};

// A left factor of bfloat16 numbers whose sum runs over tokens, each times its weight.
__device__ __forceinline__ void weigh_columns(unsigned (&x)[4], const float* weights, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float2 w = *reinterpret_cast<const float2*>(weights + half * 8 + lane % 4 * 2);
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; i++) {
      float low, high;
      unpack_bfloat16(nan_if_infinite_pair(x[i], x[i]), low, high);
      x[i] = pack_bounded(w.x * low, w.y * high);
    }
  }
}

// Gates of a chunk and what its tokens weigh beside them, two tokens a lane, as they were stored.
template <class In>
struct HeldScalars {
  Scalar<In> gate[2], beta[2];

  __device__ __forceinline__ void load(const CallArgs& a, long long b, long long h, long long t0,
                                       long long stop, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const long long t = t0 + 2 * lane + i;
      if (t >= stop) continue;
      gate[i].load(a.gate, b * a.gate_stride[0] + t * a.gate_stride[1] + h * a.gate_stride[2],
                   a.gate_kind);
      beta[i].load(a.beta, b * a.beta_stride[0] + t * a.beta_stride[1] + h * a.beta_stride[2],
                   a.beta_kind);
    }
  }
  // Past the last token: gate 1, and beta 0.
  __device__ __forceinline__ void fill(ChunkWeights& to, const CallArgs& a, long long left,
                                       bool back, int lane) const {
    double gates[2], factors[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool real = 2 * lane + i < left;
      gates[i] = real ? nan_if_infinite(gate[i].template value<double>(a.gate_kind)) : 1.0;
      // no logarithm: nothing of an exponential is compiled for it
      factors[i] = a.beta_kind == kAbsent     ? 1.0
                   : a.beta_kind == kAsInputs ? static_cast<double>(widen<float>(beta[i].narrow))
                                              : beta[i].wide;
      factors[i] = real ? nan_if_infinite(factors[i]) : 0;
      if (back) factors[i] = a.scale;
    }
    to.fill(lane, gates, factors, back);
  }
};

// grid: N * H * 2 * ceil(V / kCols) blocks, of which odd ones, before columns are told apart, go
// back. block: StatesShape::kThreads. With kWide all rows of q, k, v and dy begin at multiples of
// 16 bytes and hold whole vectors of 16 bytes.
template <class In, int K, int V, int kCols, bool kWide>
__global__ void __launch_bounds__(StatesShape<In, K, kCols, kWide>::kThreads,
                                  K <= 64 || sizeof(typename Kept<In>::Type) == 2 ? 2 : 1)
    chunk_states(const CallArgs a, const GradArgs g) {
  using S = StatesShape<In, K, kCols, kWide>;
  using F = typename S::F;
  using Out = typename Kept<In>::Type;
  constexpr int kColBlocks = (V + kCols - 1) / kCols;
  DYNAMIC_SHARED(typename F::Number, rows);
  ChunkWeights* const weights = reinterpret_cast<ChunkWeights*>(rows + S::kStages * S::kStage);

  const int warp = this_warp(), lane = threadIdx.x % 32;
  const unsigned item = blockIdx.x, heads = a.H;
  const long long nh = item / kColBlocks / 2, n = item / kColBlocks / 2 / heads;
  const long long h = item / kColBlocks / 2 % heads;
  const bool back = item / kColBlocks % 2 == 1;
  const int col0 = static_cast<int>(item % kColBlocks) * kCols;
  const int cols = V % kCols ? min(kCols, V - col0) : kCols;
  const Sequence seq = sequence(a, n);
  const int chunks = static_cast<int>((seq.stop - seq.start + kChunk - 1) / kChunk);
  const long long hq = h / a.group;
  const bool silent = back && !g.dy;
  const long long* const left_stride = back ? a.q_stride : a.k_stride;
  const long long* const right_stride = back && g.dy ? g.dy_stride : a.v_stride;
  const In* const left =
      static_cast<const In*>(back ? a.q : a.k) + seq.b * left_stride[0] + hq * left_stride[2];
  const In* const right = static_cast<const In*>(back && g.dy ? g.dy : a.v) +
                          seq.b * right_stride[0] + h * right_stride[2] + col0;
  const long long left_step = left_stride[1], right_step = right_stride[1];
  // chunks that the state goes through: the last one only where the state after it is asked for
  const int steps = back && a.state ? chunks : chunks - 1;
  const auto chunk_of = [=](int step) -> long long { return back ? chunks - 1 - step : step; };
  const auto stage_of = [=](int step) { return rows + step % S::kStages * S::kStage; };
  const auto fetch = [&](int step) {
    if (step < steps) {
      const long long t = seq.start + chunk_of(step) * kChunk;
      const int real = static_cast<int>(min(seq.stop - t, static_cast<long long>(kChunk)));
      typename F::Number* const to = stage_of(step);
      copy_rows<F, In, kChunk, S::kKeys, S::kKeyRow, S::kThreads, kWide>(to, left + t * left_step,
                                                                         left_step, real, K);
      copy_rows<F, In, kChunk, kCols, S::kValueRow, S::kThreads, kWide>(
          to + kChunk * S::kKeyRow, right + t * right_step, right_step, silent ? 0 : real, cols);
    }
    cp_async_commit();
  };
  HeldRows<In, kChunk, S::kKeys, S::kThreads, kWide> keys;
  HeldRows<In, kChunk, kCols, S::kThreads, kWide> values;
  const auto load = [&](int step) {
    if (step >= steps) return;
    const long long t = seq.start + chunk_of(step) * kChunk;
    const int real = static_cast<int>(min(seq.stop - t, static_cast<long long>(kChunk)));
    keys.load(left + t * left_step, left_step, real, K);
    values.load(right + t * right_step, right_step, silent ? 0 : real, cols);
  };
  const auto put = [&](int step) {
    if (step >= steps) return;
    typename F::Number* const to = stage_of(step);
    keys.template store<F, S::kKeyRow, kWeighed>(to, weights[step % S::kWeights].x);
    values.template store<F, S::kValueRow, kGiven>(to + kChunk * S::kKeyRow, nullptr);
  };
  HeldScalars<In> held;
  const auto hold = [&](int step) {
    if (step < steps) held.load(a, seq.b, h, seq.start + chunk_of(step) * kChunk, seq.stop, lane);
  };
  const auto weigh = [&](int step) {
    if (step < steps)
      held.fill(weights[step % S::kWeights], a, seq.stop - seq.start - chunk_of(step) * kChunk,
                back, lane);
    hold(step + S::kWarps);
  };
  hold(warp);
  if constexpr (S::kCopied) {
#pragma unroll 1
    for (int step = 0; step < S::kStages - 1; step++) fetch(step);
  } else {
    load(0);
  }
#pragma unroll 1
  for (int first = 0; first < S::kAhead; first += S::kWarps) weigh(first + warp);

  constexpr int kDown = S::kTilesDown, kAcross = S::kTilesAcross;
  const int row0 = warp % S::kRowWarps * kDown * 16, own0 = warp / S::kRowWarps * kAcross * 8;
  float x[kDown][kAcross][4], carry[kDown][kAcross][4] = {};
  const float* const given = static_cast<const float*>(back ? g.dstate : a.initial_state);
  const long long* const stride = back ? g.dstate_stride : a.state_stride;
#pragma unroll
  for (int m = 0; m < kDown; m++)
#pragma unroll
    for (int t = 0; t < kAcross; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = row0 + m * 16 + lane / 4 + i / 2 * 8;
        const int col = own0 + t * 8 + lane % 4 * 2 + i % 2;
        x[m][t][i] =
            given && row < K && col < cols
                ? given[n * stride[0] + h * stride[1] + row * stride[2] + (col0 + col) * stride[3]]
                : 0.f;
        // where it goes through no chunk it stays as it is, denormal numbers too
        if (chunks > 0) x[m][t][i] = nan_if_infinite(x[m][t][i]);
      }
  if constexpr (!S::kCopied) {
    __syncthreads();
    put(0);
    load(1);
  }
  const long long first = first_chunk(a, n, seq.start) + (back ? count_chunks(a) : 0);
  Out* target = static_cast<Out*>(g.states) + ((first + chunk_of(0)) * a.H + h) * (K * V) + col0;
  const long long next = (back ? -1 : 1) * a.H * (K * V);
#pragma unroll 1
  for (int step = 0; step < chunks; step++, target += next) {
#pragma unroll
    for (int m = 0; m < kDown; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = row0 + m * 16 + lane / 4 + 8 * i;
#pragma unroll
        for (int t = 0; t < kAcross; t += 2)
          put_pair<Out, kWide>(target + row * V, own0 + t * 8, cols, row < K, x[m][t], x[m][t + 1],
                               2 * i, lane);
      }
    if (step >= steps) break;
    if constexpr (S::kCopied) cp_async_wait<S::kStages - 2>();
    __syncthreads();
    if constexpr (S::kCopied)
      fetch(step + S::kStages - 1);
    else
      put(step + 1);
    if (step % S::kWarps == 0) weigh(step + S::kAhead + warp);  // while few registers are taken
    if constexpr (!S::kCopied) load(step + 2);
    const typename F::Number* const stage = stage_of(step);
    const ChunkWeights& w = weights[step % S::kWeights];
    const float whole = w.whole, rest = w.rest, lower = w.lower;
#pragma unroll
    for (int m = 0; m < kDown; m++)
#pragma unroll
      for (int t = 0; t < kAcross; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (F::kCarry)
            carry[m][t][i] = whole * carry[m][t][i] + rest * x[m][t][i];
          else
            x[m][t][i] *= whole;
        }
#pragma unroll(F::kCarry ? 1 : 4)
    for (int block = 0; block < kBlocks; block++) {
      typename F::Left factor[kDown];
#pragma unroll
      for (int m = 0; m < kDown; m++) {
        F::template columns<S::kKeyRow>(factor[m], stage, row0 + m * 16, block * kBlock, lane);
        if constexpr (S::kCopied) weigh_columns(factor[m].x[0], w.x + block * kBlock, lane);
      }
#pragma unroll
      for (int t = 0; t < kAcross; t += 2) {
        typename F::Right two[2];
        F::template columns<S::kValueRow>(two, stage + kChunk * S::kKeyRow, own0 + t * 8,
                                          block * kBlock, lane);
#pragma unroll
        for (int m = 0; m < kDown; m++) {
          if (F::kCarry)
            F::multiply(carry[m][t], carry[m][t + 1], factor[m], two);
          else
            F::multiply(x[m][t], x[m][t + 1], factor[m], two);
        }
      }
    }
    if (!F::kCarry && lower == 1) continue;
#pragma unroll
    for (int m = 0; m < kDown; m++)
#pragma unroll
      for (int t = 0; t < kAcross; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (lower != 1) {
            x[m][t][i] = exact_product(
                lower, F::kCarry ? fmaf(whole, x[m][t][i], carry[m][t][i]) : x[m][t][i]);
            carry[m][t][i] = 0;
            continue;
          }
          const float before = x[m][t][i], added = carry[m][t][i];
          const float after = fmaf(whole, before, added);
          carry[m][t][i] = fmaf(whole, before, -after) + added;
          x[m][t][i] = after;
        }
  }
  if (!back || !a.state) return;
  float* const kept = static_cast<float*>(a.state) + nh * (K * V) + col0;
#pragma unroll
  for (int m = 0; m < kDown; m++)
#pragma unroll
    for (int t = 0; t < kAcross; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = row0 + m * 16 + lane / 4 + i / 2 * 8;
        const int col = own0 + t * 8 + lane % 4 * 2 + i % 2;
        if (row < K && col < cols) kept[row * V + col] = x[m][t][i];
      }
}
