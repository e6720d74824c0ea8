// Memory that cannot be had is an error of the call, not the end of the process: nothing may be thrown out of a library that
// Python calls, nor out of a parallel region. So kernels allocate before their parallel regions.

#pragma once

#include <exception>

namespace {

constexpr int NO_MEMORY = -1;  // as in build.py

// What `work` returns, or NO_MEMORY.
template <class Work>
inline int guarded(Work work) noexcept {
    try {
        return work();
    } catch (const std::exception&) {  // std::bad_alloc, std::length_error
        return NO_MEMORY;
    }
}

}  // namespace
