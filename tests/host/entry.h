// SIMT_ENTRY(i, kernel<...>) exports simt_run_i, which launches the kernel with an array of pointers
// to its arguments, as cuLaunchKernel takes them, and simt_sizes_i, the sizes that they must have.
#pragma once
#include "simt.h"

namespace simt {
struct Launch;
int launch(const Launch &launch, void (*body)(void *), void *context);

// Reads Python's memory, hence not instrumented; the volatile pointer keeps the kernel out of it.
template <class... P, size_t... I>
__attribute__((noinline, no_sanitize("thread"))) void call(
    void (*volatile kernel)(P...), void *const *arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<P> *>(arguments[I])...);
}
template <class... P>
int run(void (*kernel)(P...), const Launch *what, void *const *arguments) {
    static void (*target)(P...);
    target = kernel;
    return launch(
        *what,
        [](void *list) {
            call(target, static_cast<void *const *>(list), std::index_sequence_for<P...>());
        },
        const_cast<void **>(arguments));
}
template <class... P>
int sizes(void (*)(P...), size_t *out, int room) {
    const size_t list[] = {sizeof(P)..., 0};
    for (int i = 0; i < int(sizeof...(P)) && i < room; i++) out[i] = list[i];
    return sizeof...(P);
}
}  // namespace simt

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))
#define SIMT_ENTRY(i, ...)                                                           \
    SIMT_EXPORT int simt_run_##i(const simt::Launch *what, void *const *arguments) { \
        return simt::run(&__VA_ARGS__, what, arguments);                             \
    }                                                                                \
    SIMT_EXPORT int simt_sizes_##i(size_t *out, int room) {                          \
        return simt::sizes(&__VA_ARGS__, out, room);                                 \
    }
