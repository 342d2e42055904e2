// Gradients of the delta rule in chunks of 32 tokens on tensor cores, for float32; the equations
// are those of delta_grad.cu. Factors are split in two numbers of bfloat16 (split_rows.cuh), and in
// two of TF32 where a chunk is prepared and where it is strained. delta_grad32_prepare makes the
// inverse and P of all chunks; delta_grad32_walk goes through the chunks for S and E, and in other
// blocks back for G and dE; delta_grad32_tokens makes the rest, all chunks at once, but of strained
// ones, which delta_grad32_strained has.
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
  if (chunks > 0) copier.fetch_weights(shared, 0);  // which come with the chunk
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
                         static_cast<long long>(value_tile) * S::kRowTiles * kBlockSize;
    if (copier.back) {
      ChunkColumns x;
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
      float* const misses =
          space.misses + at_entry * (kChunk * S::kValues) + value_tile * kBlocks * kBlockSize;
      if (weights.strained)
        walker.anew([&](Walker<S>& own) {
          own.template forward<true>(k, values, inverse, weights, real ? saved : nullptr, misses);
        });
      else
        walker.template forward<false>(k, values, inverse, weights, real ? saved : nullptr, misses);
    }
  }
  if (back && a.state) {
    float* const kept = static_cast<float*>(a.state) + nh * K * V + col0 + own0;
    walker.each([&](float& s, int row, int col) {
      if (row < K && own0 + col < copier.cols) kept[static_cast<long long>(row) * V + col] = s;
    });
  }
}

// Gradients of one chunk of a head, if it is strained or is not, by a block of kTokenThreads.
template <int K, int V, bool kWide, bool kDirect, bool kStrained>
__device__ __forceinline__ void make_gradients(const CallArgs& a, const GradArgs& g,
                                               const SpaceArgs& space, float* shared,
                                               unsigned item) {
  using S = TokenShape<K, V>;
  float *const q = shared, *const k = q + S::kRowsOfK, *const dy = k + S::kRowsOfK;
  float *const de = dy + S::kRowsOfV, *const products = de + S::kRowsOfV;
  float* const pairs = products + S::kPairs;
  TokenSums& sums = *reinterpret_cast<TokenSums*>(pairs + 2 * S::kPairs);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const unsigned heads = static_cast<unsigned>(a.H), h = item % heads;
  const unsigned hq = h / static_cast<unsigned>(a.group);
  const SlotChunk chunk(a, item / heads);
  if (chunk.tokens == 0) return;
  const long long b = chunk.b, t = chunk.first;
  const float* const weights = reinterpret_cast<const float*>(&space.prepared[item].weights);
  constexpr int kWeights = sizeof(ChunkWeights) / 4, kMisses = kChunk * S::kValues;
  static_assert(kWeights <= 4 * kTokenThreads, "a vector a thread");
  if (threadIdx.x == 0)
    sums.first = b * a.T + t, sums.tokens = chunk.tokens, sums.head = static_cast<int>(h);
  if (threadIdx.x < kWeights / 4)
    cp_async<16>(reinterpret_cast<float*>(&sums.weights) + 4 * threadIdx.x,
                 weights + 4 * threadIdx.x);
  if (!g.dy)
    for (int i = threadIdx.x; i < S::kRowsOfV; i += kTokenThreads) dy[i] = 0;
  const bool second = warp % 4 / 2;  // a warp has half of the rows of q, k, dy or de
  const int row0 = warp % 2 * kBlock;
  if (warp < 4)
    copy_rows<kBlock, S::kKeys, S::kKeyRow, kWide, 32>(
        second ? k : q,
        second ? head_rows(a.k, a.k_stride, b, t, hq) : head_rows(a.q, a.q_stride, b, t, hq),
        second ? a.k_stride[1] : a.q_stride[1], row0, chunk.tokens, K, lane);
  else if (second || g.dy)
    copy_rows<kBlock, S::kValues, S::kValueRow, kWide, 32>(
        second ? de : dy,
        second ? head_rows(a.y, a.y_stride, b, t, h) : head_rows(g.dy, g.dy_stride, b, t, h),
        second ? a.y_stride[1] : g.dy_stride[1], row0, chunk.tokens, V, lane);
  cp_async_commit();
  const float* const e = space.misses + static_cast<long long>(item) * kMisses;
  const float* const states = space.states + static_cast<long long>(item) * S::kState;
  const float* const late = space.late + static_cast<long long>(item) * S::kState;
  prefetch_numbers<kMisses>(e);
  prefetch_numbers<S::kState>(states);
  prefetch_numbers<S::kState>(late);
  cp_async_wait<0>();
  __syncthreads();
  if (!kStrained && sums.weights.strained) return;
  put_products<kTokenThreads / 32>(products, sums.weights, warp, lane);
  if (!kStrained && S::kKeyRow == S::kValueRow) {
    split_rows<kChunk, S::kKeys, S::kKeyRow, kTokenThreads>({q, k, dy, de}, threadIdx.x);
  } else if (!kStrained) {
    split_rows<kChunk, S::kKeys, S::kKeyRow, kTokenThreads>({q, k}, threadIdx.x);
    split_rows<kChunk, S::kValues, S::kValueRow, kTokenThreads>({dy, de}, threadIdx.x);
  }
  __syncthreads();
  const float scale = static_cast<float>(a.scale);
  TokenGradients<K, V, kDirect, kStrained> own = {
      a, g, q, k, dy, de, e, states, late, products, pairs, sums, warp, lane, scale};
  own.pair_up();
  own.read_states();
  __syncthreads();
  if (warp == kPairWarps) put_scalars<kDirect>(a, g, sums, lane);  // which has had the least to do
  own.finish();
}

// grid: slots * H. block: kTokenThreads.
template <int K, int V, bool kWide, bool kDirect>
__global__ void __launch_bounds__(kTokenThreads, kWide ? kTokenBlocks : 2)
    delta_grad32_tokens(const CallArgs a, const GradArgs g, const SpaceArgs space) {
  DYNAMIC_SHARED(float, shared);
  make_gradients<K, V, kWide, kDirect, false>(a, g, space, shared, blockIdx.x);
}

// The same of strained chunks, which are rare: in a kernel of their own, since they take more
// registers. grid: slots * H / kLooked, rounded up. block: kTokenThreads.
constexpr int kLooked = 8;  // chunks of heads that a block has a look at
template <int K, int V, bool kWide, bool kDirect>
__global__ void __launch_bounds__(kTokenThreads, 2)
    delta_grad32_strained(const CallArgs a, const GradArgs g, const SpaceArgs space) {
  DYNAMIC_SHARED(float, shared);
  const unsigned lane = threadIdx.x % 32, first = blockIdx.x * kLooked, item = first + lane;
  const bool there = lane < kLooked && item < space.slots * a.H &&
                     SlotChunk(a, item / static_cast<unsigned>(a.H)).tokens > 0;
  const bool strained = there && space.prepared[item].weights.strained;
  for (unsigned left = __ballot_sync(0xffffffffu, strained); left; left &= left - 1) {
    make_gradients<K, V, kWide, kDirect, true>(a, g, space, shared,
                                               first + __ffs(static_cast<int>(left)) - 1);
    __syncthreads();
  }
}
