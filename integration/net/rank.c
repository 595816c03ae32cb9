/* A rank of a training: the same steps on each, with gradients summed in a ring, whose losses depend on every byte.
 *
 * Like a data-parallel job over gloo: each rank has data and a copy of the model; a ring all-reduce (reduce-scatter, then
 * all-gather) adds the gradients in an order that does not depend on time. So the losses of all steps, printed with all
 * their bits, are the same in every run, on every rank. There is a pause behind each step, until SIGUSR1.
 */
#include "peer.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

enum { WEIGHTS = 8192, SAMPLES = 4, MOST_RANKS = 64 };

static float weights[WEIGHTS], gradient[WEIGHTS];
static int next_fd, previous_fd;
static volatile sig_atomic_t is_in_haste;

static float random_float(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 24) - 0.5f;
}

static void transfer(int fd, void *data, size_t bytes, int is_sent)
{
    for (char *at = data; bytes;) {
        ssize_t done = is_sent ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            fail(is_sent ? "send" : "receive");
        at += done;
        bytes -= (size_t)done;
    }
}

/* Adds what all ranks have of `count` floats. A part fits into socket buffers, so all send before they receive. */
static void all_reduce(float *data, int count, int rank, int size)
{
    static float got[WEIGHTS];
    int part = count / size;
    for (int step = 0; step < 2 * (size - 1); step++) {
        int is_sum = step < size - 1;
        int gone = (rank - step + 2 * size) % size, come = (gone + size - 1) % size;
        transfer(next_fd, data + gone * part, (size_t)part * sizeof *data, 1);
        transfer(previous_fd, got, (size_t)part * sizeof *data, 0);
        for (int i = 0; i < part; i++)
            data[come * part + i] = is_sum ? data[come * part + i] + got[i] : got[i];
    }
}

static void make_haste(int number)
{
    (void)number;
    is_in_haste = 1;
}

/* RANK SIZE STEPS PAUSE_MS OWN PORT NEXT PORT */
void train(char **words)
{
    int rank = atoi(words[0]), size = atoi(words[1]), steps = atoi(words[2]), pause_ms = atoi(words[3]);
    int listener = make_socket(words[4], atoi(words[5]), SOCK_STREAM, BIND | LISTEN);
    uint32_t data = (uint32_t)rank + 1;
    signal(SIGUSR1, make_haste);
    say("ready");
    next_fd = make_socket(words[6], atoi(words[7]), SOCK_STREAM, CONNECT);
    previous_fd = accept(listener, NULL, NULL);
    if (previous_fd < 0)
        fail("accept");
    for (int step = 0; step < steps; step++) {
        float loss[MOST_RANKS] = {0};
        for (int i = 0; i < WEIGHTS; i++)
            gradient[i] = 0;
        for (int sample = 0; sample < SAMPLES; sample++) {
            uint32_t first = data;
            float sum = 0, target = random_float(&data);
            for (int i = 0; i < WEIGHTS; i++)
                sum += weights[i] * random_float(&data);
            float error = sum - target;
            loss[rank] += error * error;
            random_float(&first);
            for (int i = 0; i < WEIGHTS; i++)
                gradient[i] += error * random_float(&first);
        }
        all_reduce(gradient, WEIGHTS, rank, size);
        all_reduce(loss, size, rank, size);
        float total = 0;
        for (int i = 0; i < size; i++)
            total += loss[i];
        for (int i = 0; i < WEIGHTS; i++)
            weights[i] -= 1e-4f * gradient[i] / (float)size;
        say("step %d loss %a", step, (double)total);
        if (!is_in_haste)
            usleep((useconds_t)pause_ms * 1000);
    }
    say("done");
    for (;;)
        pause();
}
