// The tensor-core instructions, lane by lane, with the fragments that the PTX manual gives.
#include "runtime.h"

namespace simt {
namespace {
float half(unsigned bits) {
  static const std::vector<float> table = [] {
    std::vector<float> t(1 << 16);
    for (unsigned i = 0; i < t.size(); i++) t[i] = half_bits_to_float(i);
    return t;
  }();
  return table[bits];
}

// Element i of a register: 16-bit elements lie in pairs, tf32 ones (19 bits count) singly.
template <Mma kind>
float element(unsigned r, int i) {
  if (kind == Mma::tf32) return __uint_as_float(r & ~0x1fffu);
  const unsigned bits = i ? r >> 16 : r & 0xffffu;
  return kind == Mma::bf16 ? __uint_as_float(bits << 16) : half(bits);
}

struct Operands {
  unsigned a[4], b[2];
};

// D (16 x 8) += A (16 x 2W) B (2W x 8): a register holds one of W elements along k in 4 lanes.
template <Mma kind>
void multiply(float* d, const Operands* lanes) {
  constexpr int per = kind == Mma::tf32 ? 1 : 2, half_k = 4 * per;
  const int group = simt::lane / 4, in_group = simt::lane % 4;
  for (int i = 0; i < 4; i++) {
    const int row = group + i / 2 * 8, column = in_group * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < 2 * half_k; k++) {
      const int holder = k % half_k / per, upper = k / half_k;
      const Operands &a = lanes[row % 8 * 4 + holder], &b = lanes[column * 4 + holder];
      sum += element<kind>(a.a[row / 8 + 2 * upper], k % per) * element<kind>(b.b[upper], k % per);
    }
    d[i] += sum;
  }
}
}  // namespace

void mma(Mma kind, void* d, const void* a, const void* b, Site site) {
  if (kind == Mma::f64) {
    const double mine[2] = {*static_cast<const double*>(a), *static_cast<const double*>(b)};
    double all[32][2];
    gather(~0u, mine, all, sizeof mine, site);
    for (int i = 0; i < 2; i++)
      for (int k = 0; k < 4; k++)
        static_cast<double*>(d)[i] +=
            all[simt::lane / 4 * 4 + k][0] * all[(simt::lane % 4 * 2 + i) * 4 + k][1];
    return;
  }
  Operands mine, all[32];
  memcpy(mine.a, a, sizeof mine.a);
  memcpy(mine.b, b, sizeof mine.b);
  gather(~0u, &mine, all, sizeof mine, site);
  float* out = static_cast<float*>(d);
  if (kind == Mma::bf16)
    multiply<Mma::bf16>(out, all);
  else if (kind == Mma::f16)
    multiply<Mma::f16>(out, all);
  else
    multiply<Mma::tf32>(out, all);
}

// Matrix m has its eight rows of eight 16-bit elements where lanes 8m .. 8m+7 point.
void load_matrix(unsigned* r, int count, bool transposed, const void* row, Site site) {
  const uintptr_t pc = uintptr_t(__builtin_return_address(0));
  if (int(simt::lane) < 8 * count) {
    if (uintptr_t(row) % 16) fail(describe(site) + ": the row is not aligned to 16 bytes");
    if (check::on) check::read(row, 16, pc);
  }
  const unsigned short* rows[32];
  gather(~0u, &row, rows, sizeof row, site);
  for (int m = 0; m < count; m++) {
    unsigned pair[2];
    for (int i = 0; i < 2; i++) {
      const int x = simt::lane / 4, y = simt::lane % 4 * 2 + i;
      pair[i] = transposed ? rows[m * 8 + y][x] : rows[m * 8 + x][y];
    }
    r[m] = pair[0] | pair[1] << 16;
  }
}
}  // namespace simt
