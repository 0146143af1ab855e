// c_api/guard.h: the border where exceptions become status values.
//
// guarded() runs one C API call: what it throws becomes the status and the calling thread's last error, in one line. Nothing passes it.

#pragma once

#include "base/error.h"

#include <new>
#include <system_error>

namespace mkd {

void         clear_last_error() noexcept;
void         set_last_error(const char * text) noexcept; // line breaks become spaces
const char * last_error() noexcept;

template <class Call> mkd_status guarded(Call && call) noexcept {
    clear_last_error();
    try {
        call();
        return MKD_OK;
    } catch (const Error & error) {
        set_last_error(error.what());
        return error.status();
    } catch (const std::bad_alloc &) {
        set_last_error("out of memory");
        return MKD_ERR_NOMEM;
    } catch (const std::system_error & error) { // a thread that cannot be made
        set_last_error(error.what());
        return MKD_ERR_NOMEM;
    } catch (const std::exception & error) { // llama.cpp's own
        set_last_error(error.what());
        return MKD_ERR_LLAMA;
    } catch (...) {
        set_last_error("an unknown exception");
        return MKD_ERR_LLAMA;
    }
}

// As guarded, for calls that return a number: failed is what an error returns.
template <class Result, class Call> Result guarded_value(Result failed, Call && call) noexcept {
    Result result = failed;
    return guarded([&] { result = call(); }) == MKD_OK ? result : failed;
}

template <class T> T * require(T * pointer, const char * name) {
    if (!pointer) {
        fail(MKD_ERR_ARG, "%s is NULL", name);
    }
    return pointer;
}

// A struct of the caller whose first member is struct_bytes.
template <class T> const T & require_struct(const T * pointer, const char * name) {
    require(pointer, name);
    if (pointer->struct_bytes != sizeof(T)) {
        fail(MKD_ERR_ARG, "%s: struct_bytes is %zu, this library expects %zu (another version of mkd.h, or not set)", name, pointer->struct_bytes,
             sizeof(T));
    }
    return *pointer;
}

} // namespace mkd
