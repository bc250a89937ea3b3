// What a load needs at least: reads FILE once from the page cache, by 256 KiB, and copies it to new memory
// in huge pages, with THREADS threads. Prints the seconds of each round.
//   gcc -O2 -o read_once bench/read_once.c -lpthread && ./read_once FILE THREADS ROUNDS

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)256 << 10)
#define HUGE_PAGE ((size_t)2 << 20)

static int file, threads;
static size_t size;
static char *memory;

static void *copy_share(void *thread) {
  size_t pages = (size + HUGE_PAGE - 1) / HUGE_PAGE, index = (size_t)thread;
  size_t from = pages * index / threads * HUGE_PAGE, to = pages * (index + 1) / threads * HUGE_PAGE;
  if (to > size) to = size;
  char *piece = malloc(PIECE);
  for (size_t at = from; at < to; at += PIECE) {
    ssize_t count = pread(file, piece, at + PIECE > to ? to - at : PIECE, at);
    if (count <= 0) exit(1);
    memcpy(memory + at, piece, count);
  }
  free(piece);
  return NULL;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec / 1e9;
}

int main(int count, char **arguments) {
  struct stat status;
  if (count != 4 || (file = open(arguments[1], O_RDONLY)) < 0 || fstat(file, &status)) return 1;
  size = status.st_size, threads = atoi(arguments[2]);
  pthread_t ids[threads];
  for (int round = 0; round < atoi(arguments[3]); round++) {
    double began = now();
    size_t room = size + 2 * HUGE_PAGE;
    char *all = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return 1;
    madvise(all, room, MADV_HUGEPAGE);
    memory = (char *)(((size_t)all + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    for (size_t i = 0; i < (size_t)threads; i++) pthread_create(&ids[i], NULL, copy_share, (void *)i);
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    printf("%.3f\n", now() - began);
    munmap(all, room);
  }
}
