// Walks along the chunks of few heads, cut along time into pieces that are walked all at once, in
// three launches. The first one walks up to each piece, from zeros and from as many chunks before
// it as gates take to forget whatever was there; the second one walks the pieces. The third one
// compares the state that a piece began with and the one that the piece before has left, and walks
// it again where they differ; pieces before which little is forgotten are all walked there, one
// after the other. States are compared column by column, by a part of a column's largest number:
// rows that are far smaller, of values 2^44 times as large before, are not told apart.
#pragma once
#include "bounded.cuh"
#include "call.cuh"

enum Cut { kWhole, kPieces, kAgain };  // no pieces; the first and second launch; the third one

struct CutArgs {
  float* edges;  // for each piece the state that it begins with, and the one that it leaves
  int size;      // chunks of a piece
  int pieces;    // of the longest sequence
  int early;     // whether it is the first launch
  int padding;
};

constexpr float kForgotten = 5.6843419e-14f;  // 2^-44: what gates leave of a state that is nothing

// Every number of the state that a piece begins with if it is left to the third launch: a NaN, so
// that it differs from all, and one that no sum is.
constexpr int kNoState = 0x7fc0c0de;
__device__ __forceinline__ bool is_no_state(float x) { return __float_as_int(x) == kNoState; }

struct Turns {
  int begin, end;
};

// The pieces that a block walks, of `chunks` chunks. Numbers K x V of states are kept.
template <Cut kCut, int K, int V>
struct Pieces {
  int first, past;
  const CutArgs& cut;
  long long walk;  // from 0 on, those of all heads, forward and back
  int chunks;

  // `part` counts pieces, those of all walks one after the other.
  __device__ __forceinline__ Pieces(const CutArgs& cut, long long walk, long long part, int chunks)
      : cut(cut), walk(walk), chunks(chunks) {
    const int count = kCut == kWhole ? 1 : max(1, (chunks + cut.size - 1) / cut.size);
    first = kCut == kPieces ? static_cast<int>(part % cut.pieces) : kCut == kAgain;
    past = count;
  }
  // f(piece), with which all threads of the block begin anew.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    if constexpr (kCut == kAgain)
      for (int piece = first; piece < past; piece++) f(piece);
    else if (kCut == kWhole || first < past)
      f(first);
  }
  __device__ __forceinline__ Turns turns(int piece) const {
    if (kCut == kWhole) return {0, chunks};
    return {piece * cut.size, min((piece + 1) * cut.size, chunks)};
  }
  __device__ __forceinline__ bool early() const { return kCut == kPieces && cut.early; }
  // Where the state after the turns goes, for the last ones of all `state`, which may be null.
  __device__ __forceinline__ float* target(int piece, int end, float* state) const {
    if (early()) return began(piece);
    return kCut != kWhole && end < chunks ? left(piece) : state;
  }
  __device__ __forceinline__ float* began(int piece) const {
    return cut.edges + 2 * (walk * cut.pieces + piece) * (K * V);
  }
  __device__ __forceinline__ float* left(int piece) const { return began(piece) + K * V; }
};

// How many turns before a piece suffice for it to forget what was before them; -1: not `most`. A
// lane is told by left(i) what gates leave over turn i + lane, counted back from the piece.
template <class F>
__device__ __forceinline__ int turns_to_forget(F left, int most, int lane) {
  float before = 1;
  for (int i = 0; i < most; i += 32) {
    float x = fabsf(left(i));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float more = __shfl_up_sync(0xffffffffu, x, step);
      if (lane >= step) x *= more;
    }
    x *= before;
    const unsigned enough = __ballot_sync(0xffffffffu, i + lane < most && x <= kForgotten);
    if (enough) return i + __ffs(static_cast<int>(enough));
    before = __shfl_sync(0xffffffffu, x, 31);
  }
  return -1;
}

// Compares states column by column; a thread has numbers of kColumns columns, and lanes whose
// numbers differ in bits from kFrom up to kPast alone have the others.
template <int kColumns, int kFrom, int kPast>
struct Comparison {
  float most[kColumns] = {};
  unsigned apart[kColumns] = {};  // bits of what is not negative: of those NaN are the largest

  __device__ __forceinline__ void add(int column, float x, float y) {
    most[column] = fmaxf(most[column], fabsf(x));
    widen(apart[column], __float_as_uint(fabsf(x - y)));
  }
  // Whether any differ by more than a part of their column's largest number.
  __device__ __forceinline__ bool differ(float tolerance) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
#pragma unroll
      for (int hop = kFrom; hop < kPast; hop *= 2) {
        most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffffu, most[i], hop));
        widen(apart[i], __shfl_xor_sync(0xffffffffu, apart[i], hop));
      }
      found |= !(__uint_as_float(apart[i]) <= bounded(tolerance * most[i]));  // infinity as well
    }
    return found;
  }

 private:
  static __device__ __forceinline__ void widen(unsigned& x, unsigned y) { x = x < y ? y : x; }
};

// A walker's columns in an array of K x V, from `at` on, of which `cols` are real.
template <int K, int V, class Walker>
__device__ __forceinline__ void keep(Walker& walker, float* at, int cols) {
  walker.each([=](float& s, int row, int col) {
    if (row < K && col < cols) at[static_cast<long long>(row) * V + col] = s;
  });
}
template <int K, int V, class Walker>
__device__ __forceinline__ void take(Walker& walker, const float* at, int cols) {
  walker.each([=](float& s, int row, int col) {
    s = row < K && col < cols ? at[static_cast<long long>(row) * V + col] : 0.f;
  });
}
// Takes the state that a piece has left, and compares it with the one that the next piece began
// with.
template <int K, int V, class Walker>
__device__ __forceinline__ bool differs(Walker& walker, const float* left, const float* began,
                                        int cols, float tolerance) {
  Comparison<2, 1, 4> comparison;
  walker.each([&](float& s, int row, int col) {
    const bool real = row < K && col < cols;
    s = real ? left[row * V + col] : 0.f;
    if (real) comparison.add(col & 8 ? 1 : 0, s, began[row * V + col]);
  });
  return comparison.differ(tolerance);
}

// Makes a walker ready for a piece, its columns from `col` on: the state, but that of the first
// piece, and the turns. False where there is nothing to walk. By all threads of a block, of which
// those without columns do not `walk`. left(turn) is what gates leave over a turn's chunk.
template <Cut kCut, int K, int V, class Walker, class F>
__device__ __forceinline__ bool begin_walk(const Pieces<kCut, K, V>& pieces, int piece,
                                           Turns& turns, Walker& walker, bool walks, int col,
                                           int cols, int lane, float tolerance, F left) {
  if (kCut == kAgain) {
    bool differ = false;
    if (walks)
      differ = differs<K, V>(walker, pieces.left(piece - 1) + col, pieces.began(piece) + col, cols,
                             tolerance);
    if (!__syncthreads_or(differ)) return false;
  } else if (pieces.early()) {
    if (piece == 0) return false;
    const int most = pieces.cut.size;
    const auto before = [&](int i) { return left(turns.begin - 1 - min(i + lane, most - 1)); };
    const int count = turns_to_forget(before, most, lane);
    walker.each([=](float& s, int, int) { s = count < 0 ? __int_as_float(kNoState) : 0.f; });
    if (count < 0) {
      if (walks) keep<K, V>(walker, pieces.began(piece) + col, cols);
      return false;
    }
    turns = {turns.begin - count, turns.begin};
  } else if (kCut == kPieces && piece > 0) {
    if (is_no_state(*pieces.began(piece))) return false;
    if (walks) take<K, V>(walker, pieces.began(piece) + col, cols);
  }
  return true;
}
