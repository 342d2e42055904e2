// Gradients of the delta rule in chunks of 32 tokens on tensor cores, for float32; the equations
// are those of delta_grad.cu. Factors are split in two numbers of bfloat16 (split_rows.cuh), and in
// two of TF32 where a chunk is prepared and in walks where it is strained. delta_grad32_prepare
// makes the inverse and P of all chunks; delta_grad32_walk goes through the chunks for S and E, and
// in other blocks back for G and dE; delta_grad32_tokens makes the rest, all chunks at once.
#include "delta_grad32_copy.cuh"
#include "delta_grad32_prepare.cuh"
#include "delta_grad32_tokens.cuh"
#include "delta_grad32_walk.cuh"

// grid: 2 * N * H * ceil(V / kBlockCols), first those that go back, which have more to do, so that
// a multiprocessor has one of each. block: WalkShape::kThreads. With kWide all rows of q, k, v and
// dy begin at multiples of 16 bytes and hold whole vectors of 4. kDirect: gradients of q, k, gate
// and beta are not added up by finish_grad.
template <int K, int V, int kBlockCols, int kStages, bool kWide, bool kDirect>
__global__ void __launch_bounds__(WalkShape<K, V, kBlockCols, kStages>::kThreads,
                                  kStages > 2 ? 1 : kWalkBlocks)
    delta_grad32_walk(const CallArgs a, const GradArgs g, const SpaceArgs space) {
  using S = WalkShape<K, V, kBlockCols, kStages>;
  static_assert(kBlockCols % 16 == 0, "a warp has 16 columns");
  static_assert(kStages >= 2, "one chunk at hand and one on its way");
  static_assert(!kWide || (K % 4 == 0 && V % 4 == 0), "rows of whole vectors");
  DYNAMIC_SHARED(float, shared);
  for (int i = threadIdx.x; i < kStages * S::kStage; i += S::kThreads) shared[i] = 0;  // padding

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const long long half = gridDim.x / 2;
  const bool back = blockIdx.x < half;
  const long long item = back ? blockIdx.x : blockIdx.x - half;
  const int col0 = static_cast<int>(item % S::kColBlocks) * kBlockCols;
  const int cols = min(kBlockCols, V - col0);
  const long long nh = item / S::kColBlocks, n = nh / a.H, h = nh % a.H;
  const Sequence seq = sequence(a, n);
  const long long b = seq.b, start = seq.start, stop = seq.stop;
  const int chunks = static_cast<int>((stop - start + kChunk - 1) / kChunk);
  const long long entry = first_slot<kChunk>(a, n) * a.H + h;
  float* const dv = static_cast<float*>(a.y) + b * a.y_stride[0] + h * a.y_stride[2] + col0;
  if (back && a.cu_seqlens && n == a.N - 1)
    clear_tail<K>(a, g, h, stop, dv, cols, kDirect && col0 == 0);

  const long long hq = h / a.group;
  const float* values = head_rows(a.v, a.v_stride, b, start, h) + col0;
  if (back) values = g.dy ? head_rows(g.dy, g.dy_stride, b, start, h) + col0 : nullptr;
  using Copier = ChunkCopier<S, K, kBlockCols, kStages, kWide>;
  static_assert(sizeof(Copier) <= kCopierBytes, "its place");
  Copier& copier = *reinterpret_cast<Copier*>(shared + S::kCopierAt);
  if (threadIdx.x == 0)
    copier = {head_rows(a.k, a.k_stride, b, start, hq),
              head_rows(a.q, a.q_stride, b, start, hq),
              values,
              space.prepared + entry,
              a.k_stride[1],
              a.q_stride[1],
              back ? g.dy_stride[1] : a.v_stride[1],
              stop - start,
              a.H,
              chunks,
              cols,
              back,
              0,
              dv + start * a.y_stride[1],
              entry,
              back ? space.late : space.states,
              static_cast<float>(a.scale)};
  __syncthreads();
  if (chunks > 0) copier.fetch_weights(shared, 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < kStages - 1; i++) copier.fetch(shared, i);

  const int group = warp / S::kParts, own0 = group * 16, value_tile = col0 / 16 + group;
  Walker<S> walker;
  walker.lane = lane;
  walker.part = warp % S::kParts;
  walker.barrier = 1 + group;
  walker.sums =
      reinterpret_cast<float4*>(shared + S::kSumsAt) + group * S::kParts * (kChunk / 8 * 32);
  const void* const first = back ? g.dstate : a.initial_state;
  const long long* const stride = back ? g.dstate_stride : a.state_stride;
  const float* const at =
      static_cast<const float*>(first) + n * stride[0] + h * stride[1] + (col0 + own0) * stride[3];
  walker.each([&](float& s, int row, int col) {
    s = first && row < K && own0 + col < cols ? at[row * stride[2] + col * stride[3]] : 0.f;
  });
  for (int i = 0; i < copier.chunks; i++) {
    copier.turn(shared, i);
    const int c = copier.chunk(i);
    const float* const k = copier.stage(shared, i);
    const float* const values = k + S::kValuesAt + own0;
    const float* const inverse = k + S::kPairsAt;
    const ChunkWeights& weights = *reinterpret_cast<const ChunkWeights*>(copier.weights(shared, i));
    const long long at_entry = copier.entry + c * a.H;
    const bool real = V % kBlockCols == 0 || value_tile < S::kValueTiles;
    float* const saved = copier.states + at_entry * S::kState +
                         static_cast<long long>(value_tile) * S::kRowTiles * kStateBlock;
    ChunkColumns x;
    if (copier.back) {
      const float* const q = k + S::kRowsOfK;
      const float* const scores = inverse + S::kPairs;
      if (weights.strained)
        walker.anew([&](Walker<S>& own) {
          own.template back<true>(x, k, q, values, inverse, scores, weights, real ? saved : nullptr,
                                  copier.scale);
        });
      else
        walker.template back<false>(x, k, q, values, inverse, scores, weights,
                                    real ? saved : nullptr, copier.scale);
      const long long t = static_cast<long long>(c) * kChunk;
      const int tokens = static_cast<int>(min(copier.tokens - t, static_cast<long long>(kChunk)));
      walker.put(copier.dv + t * a.y_stride[1] + own0, a.y_stride[1], x, tokens,
                 copier.cols - own0);
    } else {
      if (weights.strained)
        walker.anew([&](Walker<S>& own) {
          own.template forward<true>(x, k, values, inverse, weights, real ? saved : nullptr);
        });
      else
        walker.template forward<false>(x, k, values, inverse, weights, real ? saved : nullptr);
      if (real)
        walker.put(space.misses + at_entry * (kChunk * S::kValues) + value_tile * 16, S::kValues, x,
                   kChunk, 16);
    }
  }
  if (back && a.state) {
    float* const kept = static_cast<float*>(a.state) + nh * K * V + col0 + own0;
    walker.each([&](float& s, int row, int col) {
      if (row < K && own0 + col < copier.cols) kept[static_cast<long long>(row) * V + col] = s;
    });
  }
}

// grid: slots * H. block: kTokenThreads.
template <int K, int V, bool kWide, bool kDirect>
__global__ void __launch_bounds__(kTokenThreads, 2)
    delta_grad32_tokens(const CallArgs a, const GradArgs g, const SpaceArgs space) {
  using S = TokenShape<K, V>;
  DYNAMIC_SHARED(float, shared);
  float *const q = shared, *const k = q + S::kRowsOfK, *const dy = k + S::kRowsOfK;
  float *const de = dy + S::kRowsOfV, *const e = de + S::kRowsOfV;
  float *const states = e + S::kRowsOfV, *const late = states + S::kState;
  float *const products = late + S::kState, *const pairs = products + S::kPairs;
  TokenSums& sums = *reinterpret_cast<TokenSums*>(pairs + 2 * S::kPairs);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const long long item = blockIdx.x, h = item % a.H, hq = h / a.group;
  const SlotChunk chunk(a, item / a.H);
  if (chunk.tokens == 0) return;
  const long long b = chunk.b, t = chunk.first;
  if (!g.dy)
    for (int i = threadIdx.x; i < S::kRowsOfV; i += kTokenThreads) dy[i] = 0;
  fetch_rows<K, kWide>(q, head_rows(a.q, a.q_stride, b, t, hq), a.q_stride[1], chunk.tokens);
  fetch_rows<K, kWide>(k, head_rows(a.k, a.k_stride, b, t, hq), a.k_stride[1], chunk.tokens);
  if (g.dy)
    fetch_rows<V, kWide>(dy, head_rows(g.dy, g.dy_stride, b, t, h), g.dy_stride[1], chunk.tokens);
  fetch_rows<V, kWide>(de, head_rows(a.y, a.y_stride, b, t, h), a.y_stride[1], chunk.tokens);
  fetch_rows<S::kValues, true>(e, space.misses + item * (kChunk * S::kValues), S::kValues, kChunk);
  cp_async_commit();
#pragma unroll 4
  for (int i = 4 * threadIdx.x; i < S::kState; i += 4 * kTokenThreads) {
    cp_async<16>(states + i, space.states + item * S::kState + i);
    cp_async<16>(late + i, space.late + item * S::kState + i);
  }
  cp_async_commit();
  TokenGradients<K, V, kDirect> own = {a,
                                       g,
                                       chunk,
                                       h,
                                       q,
                                       k,
                                       dy,
                                       de,
                                       e,
                                       states,
                                       late,
                                       products,
                                       pairs,
                                       sums,
                                       warp,
                                       lane,
                                       static_cast<float>(a.scale)};
  if (warp == 0) {
    weigh(sums.weights, a, chunk, h, lane);
    __syncwarp();
    put_products(products, sums.weights, lane);
  }
  cp_async_wait<1>();
  if (!kWide) __syncthreads();  // others have brought what is split here
  split_rows<kChunk, S::kKeys, S::kKeyRow, kTokenThreads>(q, threadIdx.x);
  split_rows<kChunk, S::kKeys, S::kKeyRow, kTokenThreads>(k, threadIdx.x);
  if (g.dy) split_rows<kChunk, S::kValues, S::kValueRow, kTokenThreads>(dy, threadIdx.x);
  split_rows<kChunk, S::kValues, S::kValueRow, kTokenThreads>(de, threadIdx.x);
  split_rows<kChunk, S::kValues, S::kValueRow, kTokenThreads>(e, threadIdx.x);
  __syncthreads();
  own.pair_up();
  cp_async_wait<0>();
  __syncthreads();
  own.read_states();
  __syncthreads();
  if (warp == kPairWarps)
    put_scalars<kDirect>(a, g, chunk, h, sums, lane);  // which has had the least to do
  own.finish();
}
