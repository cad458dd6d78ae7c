"""Shows that torch's profiler must not end before gloo's threads sleep (measure/harness/gloo_threads.py).

    python results/cpu/gloo_profiler.py 1000 > results/cpu/gloo_profiler.md      # Linux with gcc; half a minute

A process profiles one message of gloo after the other, each in a profile of its own, and awaits it by its future, as
DistributedDataParallel does, or by its `wait()`. A preloaded library makes a rare fault certain: its allocator forbids access to
freed blocks of 4 KiB and more, so that whatever writes into one ends the process by a segmentation fault, and gloo's thread works
for 5 ms after it has woken others, as if it had to wait for a core.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAYS = ("future", "work", "future, then gloo's threads")
ALLOCATOR = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
extern void *__libc_malloc(size_t), *__libc_realloc(void *, size_t);
extern void __libc_free(void *);
static const uint64_t SPAN = 1ULL << 43;
static char *base;
static uint64_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t pages_of(size_t bytes) { return (bytes + 16 + 4095) & ~4095ULL; }
static int is_ours(void *block) { return base && (char *)block >= base && (char *)block < base + SPAN; }
void *malloc(size_t bytes) {
    if (bytes < 4096 || bytes >= 1 << 22) return __libc_malloc(bytes);
    pthread_mutex_lock(&lock);
    if (!base) base = mmap(0, SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *pages = base + used;
    used += pages_of(bytes);
    pthread_mutex_unlock(&lock);
    if (base == MAP_FAILED || mprotect(pages, pages_of(bytes), PROT_READ | PROT_WRITE)) _exit(9);
    *(size_t *)pages = bytes;
    return pages + 16;
}
void free(void *block) {
    if (!is_ours(block)) { __libc_free(block); return; }
    size_t pages = pages_of(*(size_t *)((char *)block - 16));
    madvise((char *)block - 16, pages, MADV_DONTNEED);
    mprotect((char *)block - 16, pages, PROT_NONE);
}
void *realloc(void *block, size_t bytes) {
    if (!is_ours(block)) return block ? __libc_realloc(block, bytes) : malloc(bytes);
    size_t before = *(size_t *)((char *)block - 16);
    void *moved = malloc(bytes ? bytes : 1);
    memcpy(moved, block, before < bytes ? before : bytes);
    free(block);
    return moved;
}
int pthread_cond_broadcast(pthread_cond_t *condition) {
    static int (*wake)(pthread_cond_t *);
    if (!wake) wake = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
    int result = wake(condition);
    char name[16];
    struct timespec began, now;
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (strcmp(name, "pt_gloo_runloop")) return result;
    clock_gettime(CLOCK_MONOTONIC, &began);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - began.tv_sec) * 1000000000L + now.tv_nsec - began.tv_nsec < 5000000L);
    return result;
}
"""


def profiles(way: str, count: int) -> None:
    """Profile `count` messages; note after each how many there were, and how many had not ended when their profile did."""
    import torch.distributed
    from torch.profiler import ProfilerActivity, profile

    from trainstep.measure.harness.gloo_threads import wait_for_gloo_threads

    torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=0, world_size=1)
    early, told = 0, os.open("progress", os.O_WRONLY)
    for number in range(1, count + 1):
        profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        profiler.start()
        message = torch.distributed.all_reduce(torch.randn(16), async_op=True)
        (message if way == "work" else message.get_future()).wait()
        if way == WAYS[-1]:
            wait_for_gloo_threads()
        early += not message.is_completed()
        profiler.stop()
        os.pwrite(told, f"{number:9d} {early:9d}".encode(), 0)
    os._exit(0)


def main() -> None:
    if len(sys.argv) < 2 or not sys.argv[-1].isdecimal():
        sys.exit(__doc__)
    if sys.argv[1] == "profiles":
        profiles(sys.argv[2], int(sys.argv[3]))
    print(
        "| awaited by | profiles | of messages that had not ended | the process ended by |\n|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "guard.c").write_text(ALLOCATOR)
        subprocess.run(
            ["gcc", "-O1", "-shared", "-fPIC", "-w", "guard.c", "-o", "guard.so", "-ldl"], cwd=folder, check=True
        )
        environ = {
            **os.environ,
            "KINETO_LOG_LEVEL": "6",
            "LD_PRELOAD": f"{folder}/guard.so",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "src"),
        }
        for way in WAYS:
            Path(folder, "meeting").unlink(missing_ok=True)
            Path(folder, "progress").write_text("0 0")
            command = [sys.executable, str(Path(__file__).resolve()), "profiles", way, sys.argv[1]]
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, check=False)
            number, early = Path(folder, "progress").read_text().split()
            ending = "itself" if done.returncode == 0 else signal.Signals(-done.returncode).name
            print(f"| {way} | {number} | {early} | {ending} |", flush=True)


if __name__ == "__main__":
    main()
