// tools/signals.cpp: see the header. The handler touches lock-free atomics, mkd_session_interrupt and _exit only.

#include "tools/signals.h"

#include <atomic>
#include <csignal>
#include <unistd.h>

namespace mkd_run {

namespace {

std::atomic<mkd_session_t> g_working{ nullptr };
std::atomic<int>           g_signal{ 0 };
std::atomic<bool>          g_terminated{ false };
static_assert(std::atomic<mkd_session_t>::is_always_lock_free && std::atomic<int>::is_always_lock_free, "used in a signal handler");

void on_signal(int number) {
    const mkd_session_t session = g_working.load();
    if (!session) {
        _exit(128 + number);
    }
    g_signal.store(number);
    if (number == SIGTERM) {
        g_terminated.store(true);
    }
    mkd_session_interrupt(session);
}

} // namespace

void install_signals() {
    struct sigaction action {};
    sigemptyset(&action.sa_mask);
    action.sa_handler = on_signal;
    action.sa_flags   = SA_RESTART;
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, nullptr);
}

Working::Working(mkd_session_t session) {
    g_signal.store(0);
    g_working.store(session);
}

Working::~Working() { g_working.store(nullptr); }

int  exit_signal() { return g_signal.load(); }
bool is_terminated() { return g_terminated.load(); }

} // namespace mkd_run
