/* Threads that work on one pass together. */
#pragma once

typedef struct {
    int64_t *arrived; /* of all threads, over all rounds */
    int64_t *taken;   /* units that were nobody's own, over all products */
    int64_t num, thread, rounds, before;
    const char *soon, *soon_end; /* memory that this thread is going to read */
} Team;

/* counters: two zeros. */
static inline Team join(int64_t *counters) {
    Team team = {.arrived = counters, .taken = counters + 1, .num = 1};
#ifdef _OPENMP
    team.num = omp_get_num_threads();
    team.thread = omp_get_thread_num();
#endif
    return team;
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

/* A thread's own units [at, last) of a product; from `free` on they are for who comes first, so that
   nobody waits long for another. */
typedef struct {
    int64_t at, last, free, all;
} Share;

/* At least `free` units are nobody's own. */
static inline Share share_of(const Team *team, int64_t all, int64_t free) {
    const int64_t own = (all - free) / team->num;
    return (Share){own * team->thread, own * (team->thread + 1), own * team->num, all};
}

/* The next unit; `all` or more: there is none. Every thread asks until there is none, and no more. */
static inline int64_t next_unit(Team *team, Share *s) {
    if (s->at < s->last) return s->at++;
    const int64_t before = team->before;
    const int64_t unit = s->free + __atomic_fetch_add(team->taken, 1, __ATOMIC_RELAXED) - before;
    if (unit >= s->all) team->before += s->all - s->free + team->num;
    return unit;
}
