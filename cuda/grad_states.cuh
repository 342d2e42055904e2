// The state before each chunk, and the gradient of the state after it: chunk by chunk, with one
// barrier for each. While a chunk is multiplied the next ones are on their way: whole vectors of
// bfloat16 to shared memory as they are, all else through registers, where keys get their weights.
#pragma once
#include "cut.cuh"
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

// States that are the same but for rounding, by this part of a column's largest number.
constexpr float kUnlike = 1.f / (1 << 20);

// The product of the gates of a chunk's tokens, by one warp.
template <class In>
__device__ __forceinline__ float product_of_gates(const CallArgs& a, long long b, long long h,
                                                  long long t0, long long stop, int lane) {
  float x = 1;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const long long t = t0 + 2 * lane + i;
    if (t >= stop) continue;
    Scalar<In> gate;
    gate.load(a.gate, b * a.gate_stride[0] + t * a.gate_stride[1] + h * a.gate_stride[2],
              a.gate_kind);
    x *= gate.template value<float>(a.gate_kind);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x *= __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// f(number, row, column, which one of the thread's columns) for all numbers of a thread's tiles,
// which begin at row0 and col0.
template <int kDown, int kAcross, class F>
__device__ __forceinline__ void each_number(float (&x)[kDown][kAcross][4], int row0, int col0,
                                            int lane, F f) {
#pragma unroll
  for (int m = 0; m < kDown; m++)
#pragma unroll
    for (int t = 0; t < kAcross; t++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        f(x[m][t][i], row0 + m * 16 + lane / 4 + i / 2 * 8, col0 + t * 8 + lane % 4 * 2 + i % 2,
          2 * t + i % 2);
}

// grid: N * H * 2 * ceil(V / kCols) blocks, of which odd ones, before columns are told apart, go
// back; of kPieces cut.pieces times that. block: StatesShape::kThreads. With kWide all rows of q,
// k, v and dy begin at multiples of 16 bytes and hold whole vectors of 16 bytes.
template <class In, int K, int V, int kCols, bool kWide, Cut kCut>
__global__ void __launch_bounds__(StatesShape<In, K, kCols, kWide>::kThreads,
                                  kCut == kPieces && sizeof(In) == 2                ? 1
                                  : K <= 64 || sizeof(typename Kept<In>::Type) == 2 ? 2
                                                                                    : 1)
    chunk_states(const CallArgs a, const GradArgs g, const CutArgs cut) {
  using S = StatesShape<In, K, kCols, kWide>;
  using F = typename S::F;
  using Out = typename Kept<In>::Type;
  constexpr int kColBlocks = (V + kCols - 1) / kCols;
  DYNAMIC_SHARED(typename F::Number, rows);
  ChunkWeights* const weights = reinterpret_cast<ChunkWeights*>(rows + S::kStages * S::kStage);

  const int warp = this_warp(), lane = threadIdx.x % 32;
  const unsigned item = kCut == kPieces ? blockIdx.x / cut.pieces : blockIdx.x, heads = a.H;
  const long long nh = item / kColBlocks / 2, n = item / kColBlocks / 2 / heads;
  const long long h = item / kColBlocks / 2 % heads;
  const bool back = item / kColBlocks % 2 == 1;
  const int col0 = static_cast<int>(item % kColBlocks) * kCols;
  const int cols = V % kCols ? min(kCols, V - col0) : kCols;
  const Sequence seq = sequence(a, n);
  const int chunks = static_cast<int>((seq.stop - seq.start + kChunk - 1) / kChunk);
  const Pieces<kCut, K, V> pieces(cut, 2 * nh + back, blockIdx.x, chunks);
  const long long hq = h / a.group;
  const bool silent = back && !g.dy;
  const long long* const left_stride = back ? a.q_stride : a.k_stride;
  const long long* const right_stride = back && g.dy ? g.dy_stride : a.v_stride;
  const In* const left =
      static_cast<const In*>(back ? a.q : a.k) + seq.b * left_stride[0] + hq * left_stride[2];
  const In* const right = static_cast<const In*>(back && g.dy ? g.dy : a.v) +
                          seq.b * right_stride[0] + h * right_stride[2] + col0;
  const long long left_step = left_stride[1], right_step = right_stride[1];
  constexpr int kDown = S::kTilesDown, kAcross = S::kTilesAcross;
  const int row0 = warp % S::kRowWarps * kDown * 16, own0 = warp / S::kRowWarps * kAcross * 8;
  pieces.each([&](int piece) {
    Turns turns = pieces.turns(piece);
    float x[kDown][kAcross][4], carry[kDown][kAcross][4] = {};
    const auto keep = [&](float* to) {
      each_number(x, row0, own0, lane, [=](float s, int row, int col, int) {
        if (row < K && col < cols) to[row * V + col] = s;
      });
    };
    const bool early = pieces.early();
    if (kCut == kAgain) {
      const float* const left = pieces.left(piece - 1) + col0;
      const float* const began = pieces.began(piece) + col0;
      Comparison<2 * kAcross, 4, 32> comparison;
      each_number(x, row0, own0, lane, [&](float& s, int row, int col, int column) {
        const bool real = row < K && col < cols;
        s = real ? left[row * V + col] : 0.f;
        if (real) comparison.add(column, s, began[row * V + col]);
      });
      if (!__syncthreads_or(comparison.differ(kUnlike))) return;
    } else if (early) {
      if (piece == 0) return;
      float* const products = reinterpret_cast<float*>(weights);
      const auto left = [&](int first) {
        __syncthreads();
        for (int i = warp; i < 32; i += S::kWarps) {
          const int turn = turns.begin - 1 - min(first + i, cut.size - 1);
          const long long c = back ? chunks - 1 - turn : turn;
          const float product =
              product_of_gates<In>(a, seq.b, h, seq.start + c * kChunk, seq.stop, lane);
          if (lane == 0) products[i] = product;
        }
        __syncthreads();
        return products[lane];
      };
      const int count = turns_to_forget(left, cut.size, lane);
      each_number(x, row0, own0, lane,
                  [=](float& s, int, int, int) { s = count < 0 ? __int_as_float(kNoState) : 0.f; });
      if (count < 0) {
        keep(pieces.began(piece) + col0);
        return;
      }
      turns = {turns.begin - count, turns.begin};
      __syncthreads();  // products have been read
    } else if (piece > 0) {
      const float* const began = pieces.began(piece) + col0;
      if (is_no_state(*began)) return;
      each_number(x, row0, own0, lane, [=](float& s, int row, int col, int) {
        s = row < K && col < cols ? began[row * V + col] : 0.f;
      });
    }
    float* const state = back && a.state ? static_cast<float*>(a.state) + nh * (K * V) : nullptr;
    float* const to = pieces.target(piece, turns.end, state);
    const int length = turns.end - turns.begin;
    // chunks that the state goes through: the last one only where the state after it is asked for
    const int steps = to ? length : length - 1;
    const auto chunk_of = [=](int step) -> long long {
      return back ? chunks - 1 - (turns.begin + step) : turns.begin + step;
    };
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

    if (piece == 0) {
      const float* const given = static_cast<const float*>(back ? g.dstate : a.initial_state);
      const long long* const stride = back ? g.dstate_stride : a.state_stride;
      each_number(x, row0, own0, lane, [&](float& s, int row, int col, int) {
        s = given && row < K && col < cols
                ? given[n * stride[0] + h * stride[1] + row * stride[2] + (col0 + col) * stride[3]]
                : 0.f;
        // where it goes through no chunk it stays as it is, denormal numbers too
        if (chunks > 0) s = nan_if_infinite(s);
      });
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
    for (int step = 0; step < length; step++, target += next) {
      if (!early)
#pragma unroll
        for (int m = 0; m < kDown; m++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int row = row0 + m * 16 + lane / 4 + 8 * i;
#pragma unroll
            for (int t = 0; t < kAcross; t += 2)
              put_pair<Out, kWide>(target + row * V, own0 + t * 8, cols, row < K, x[m][t],
                                   x[m][t + 1], 2 * i, lane);
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
      const float all = w.whole, rest = w.rest, lower = w.lower;
#pragma unroll
      for (int m = 0; m < kDown; m++)
#pragma unroll
        for (int t = 0; t < kAcross; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            if (F::kCarry)
              carry[m][t][i] = all * carry[m][t][i] + rest * x[m][t][i];
            else
              x[m][t][i] *= all;
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
                  lower, F::kCarry ? fmaf(all, x[m][t][i], carry[m][t][i]) : x[m][t][i]);
              carry[m][t][i] = 0;
              continue;
            }
            const float before = x[m][t][i], added = carry[m][t][i];
            const float after = fmaf(all, before, added);
            carry[m][t][i] = fmaf(all, before, -after) + added;
            x[m][t][i] = after;
          }
    }
    if (to) keep(to + col0);
  });
}
