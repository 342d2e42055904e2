// SIMT_ENTRY(i, kernel<...>) exports simt_run_i, which launches the kernel with an array of
// pointers to its arguments, as cuLaunchKernel takes them, and simt_sizes_i, the sizes that they
// must have.
#pragma once
#include "simt.h"

namespace simt {
struct Launch;
int launch(const Launch& launch, void (*body)(void*), void* context);

template <class... P>
struct Call {
  void (*volatile kernel)(P...);  // volatile keeps the kernel from being inlined into run
  void* const* arguments;

  // Reads Python's memory, hence not instrumented.
  template <size_t... I>
  __attribute__((noinline, no_sanitize("thread"))) void run(std::index_sequence<I...>) const {
    kernel(*static_cast<std::remove_reference_t<P>*>(arguments[I])...);
  }
  static void body(void* self) { static_cast<Call*>(self)->run(std::index_sequence_for<P...>()); }
};
template <class... P>
int run(void (*kernel)(P...), const Launch* what, void* const* arguments) {
  Call<P...> call = {kernel, arguments};
  return launch(*what, Call<P...>::body, &call);
}
template <class... P>
int sizes(void (*)(P...), size_t* out, int room) {
  const size_t list[] = {sizeof(P)..., 0};
  for (int i = 0; i < int(sizeof...(P)) && i < room; i++) out[i] = list[i];
  return sizeof...(P);
}
}  // namespace simt

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))
#define SIMT_ENTRY(i, ...)                                                         \
  SIMT_EXPORT int simt_run_##i(const simt::Launch* what, void* const* arguments) { \
    return simt::run(&__VA_ARGS__, what, arguments);                               \
  }                                                                                \
  SIMT_EXPORT int simt_sizes_##i(size_t* out, int room) {                          \
    return simt::sizes(&__VA_ARGS__, out, room);                                   \
  }
