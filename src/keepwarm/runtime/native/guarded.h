// If there is no memory, the call fails, and not the process. No exception may leave a library that Python calls, nor a
// parallel region. So kernels allocate before their parallel regions, and `guarded` catches what that throws.

#pragma once

#include <exception>

namespace {

constexpr int NO_MEMORY = -1;  // as in build.py

// Returns what `work` returns, or NO_MEMORY.
template <class Work>
inline int guarded(Work work) noexcept {
    try {
        return work();
    } catch (const std::exception&) {  // std::bad_alloc, std::length_error
        return NO_MEMORY;
    }
}

}  // namespace
