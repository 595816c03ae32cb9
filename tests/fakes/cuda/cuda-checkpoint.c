/* A stand-in for NVIDIA's program cuda-checkpoint, which CRIU's CUDA plugin calls: its command line, over the checkpoint
 * calls of whichever libcuda is there. The real one is a shell around a table of that library that nobody documents.
 *
 * It answers as the real one is documented to (github.com/NVIDIA/cuda-checkpoint, README.md): what it is asked for on
 * stdout and 0, or what went wrong and 1. Each call is written to /run/ocihook-fake-cuda-calls, if that is there.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct lock_arguments { uint32_t timeout_ms, reserved0; uint64_t reserved[7]; }; /* CUcheckpointLockArgs */

int cuCheckpointProcessGetState(int, int *), cuCheckpointProcessGetRestoreThreadId(int, int *),
    cuCheckpointProcessLock(int, struct lock_arguments *), cuCheckpointProcessCheckpoint(int, void *),
    cuCheckpointProcessRestore(int, void *), cuCheckpointProcessUnlock(int, void *), cuGetErrorName(int, const char **);

static const char *const states[] = { "running", "locked", "checkpointed", "failed" };

static void record(int count, char **words)
{
    FILE *calls = fopen("/run/ocihook-fake-cuda-calls", "r+e");
    if (!calls)
        return;
    fseek(calls, 0, SEEK_END);
    char line[256] = "";
    for (int i = 1; i < count && strlen(line) + strlen(words[i]) + 2 < sizeof line; i++)
        strcat(strcat(line, words[i]), i + 1 < count ? " " : "\n");
    fputs(line, calls);
    fclose(calls);
}

int main(int count, char **words)
{
    const char *verb = "", *action = "";
    int pid = 0, value = 0, result;
    struct lock_arguments arguments = { 0 };
    record(count, words);
    for (int i = 1; i < count; i++) {
        const char *next = i + 1 < count ? words[i + 1] : "";
        if (!strcmp(words[i], "--pid") || !strcmp(words[i], "-p"))
            pid = atoi(next), i++;
        else if (!strcmp(words[i], "--timeout") || !strcmp(words[i], "-t"))
            arguments.timeout_ms = (uint32_t)atoi(next), i++;
        else if (!strcmp(words[i], "--action"))
            action = next, i++;
        else
            verb = words[i];
    }
    if (!strcmp(verb, "--help") || !strcmp(verb, "-h")) {
        puts("--get-state --pid <pid>\n--action lock | checkpoint | restore | unlock --pid <pid> [--timeout <ms>]\n"
             "--get-restore-tid --pid <pid>");
        return 0;
    }
    if (!strcmp(verb, "--get-state"))
        result = cuCheckpointProcessGetState(pid, &value);
    else if (!strcmp(verb, "--get-restore-tid"))
        result = cuCheckpointProcessGetRestoreThreadId(pid, &value);
    else if (!strcmp(action, "lock"))
        result = cuCheckpointProcessLock(pid, &arguments);
    else if (!strcmp(action, "checkpoint"))
        result = cuCheckpointProcessCheckpoint(pid, NULL);
    else if (!strcmp(action, "restore"))
        result = cuCheckpointProcessRestore(pid, NULL);
    else if (!strcmp(action, "unlock"))
        result = cuCheckpointProcessUnlock(pid, NULL);
    else {
        fprintf(stderr, "what is to be done?\n");
        return 1;
    }
    if (result) {
        const char *name = "unknown";
        cuGetErrorName(result, &name);
        fprintf(stderr, "Could not %s%s process %d: %s\n", verb, action, pid, name);
        return 1;
    }
    if (!strcmp(verb, "--get-state"))
        puts(states[value & 3]);
    else if (*verb)
        printf("%d\n", value);
    return 0;
}
