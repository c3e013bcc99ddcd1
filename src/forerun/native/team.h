/* Threads that work on one pass together. */
#pragma once

typedef struct {
    int64_t *arrived; /* of all threads, over all rounds */
    int64_t num, thread, rounds;
    const char *soon, *soon_end; /* memory that this thread is going to read */
} Team;

static inline Team join(int64_t *arrived) {
#ifdef _OPENMP
    return (Team){arrived, omp_get_num_threads(), omp_get_thread_num(), 0, NULL, NULL};
#else
    return (Team){arrived, 1, 0, 0, NULL, NULL};
#endif
}

/* All threads arrive before any goes on. OpenMP's own barrier spins for a millisecond, which starves
   the thread it waits for where the processors are busy otherwise: this one soon gives way. Who waits
   fetches what it reads soon, so that memory does not rest. */
static inline void meet(Team *team) {
    const int64_t all = ++team->rounds * team->num;
    __atomic_add_fetch(team->arrived, 1, __ATOMIC_ACQ_REL);
    for (int spins = 0; __atomic_load_n(team->arrived, __ATOMIC_ACQUIRE) < all; spins++) {
        if (team->soon < team->soon_end) {
            for (int i = 0; i < 4; i++) __builtin_prefetch(team->soon + i * 64, 0, 2);
            team->soon += 256;
        } else if (spins > 2000) sched_yield();
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}
