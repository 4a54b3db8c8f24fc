/* What the headers have for macOS alone, where files and forks are concerned; see darwin.h.
 *
 *   darwin FOLDER
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "cseq_fork.h"

#define REQUIRE(condition) \
    if (!(condition)) return fprintf(stderr, "FAILED, line %d: %s\n", __LINE__, #condition), 1

enum { AT = 1 << 20, SIZE = 300000 };

int main(int count, char **arguments) {
    char name[300];
    snprintf(name, sizeof name, "%s/cseq-XXXXXX", count > 1 ? arguments[1] : "/tmp");
    int fd = mkstemp(name), reader = open(name, O_RDONLY);
    unlink(name);
    REQUIRE(fd >= 0 && reader >= 0 && ftruncate(fd, (off_t)1 << 40) == 0);
    const struct rlimit limit = {AT + SIZE, RLIM_INFINITY}; /* should zeros be written after all */
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);

    /* a part of a hole is filled; what is more than the disk is refused, and takes none of it */
    struct stat before, after;
    REQUIRE(cseq_commit(fd, AT, SIZE) == 0);
    REQUIRE(fstat(fd, &before) == 0 && before.st_blocks * 512 >= SIZE);
    REQUIRE(cseq_commit(fd, AT, (uint64_t)1 << 61) == ENOSPC);
    REQUIRE(cseq_commit(reader, AT, SIZE) == EBADF);
    REQUIRE(fstat(fd, &after) == 0 && after.st_blocks == before.st_blocks);
    REQUIRE(cseq_punch(fd, AT, SIZE) == ENOSYS);

    /* a child has what is in use for itself */
    cseq_list spans = {0, 0};
    cseq_span span;
    char *mine = cseq_map(fd, AT, SIZE, 0), *other = cseq_map(fd, AT, SIZE, 0);
    REQUIRE(mine && other && mine[0] == 0);
    memset(mine, 1, SIZE);
    cseq_span_add(&spans, &span, mine, SIZE);
    cseq_spans_prepare(&spans, 0);
    pid_t child = fork();
    if (!child) {
        cseq_spans_child(&spans);
        memset(other, 2, SIZE); /* as its parent would, later */
        _exit(mine[0] == 1 && mine[SIZE - 1] == 1 ? 0 : 1);
    }
    cseq_spans_parent(&spans);
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
    REQUIRE(mine[0] == 2 && mine[SIZE - 1] == 2);
    puts("ok");
    return 0;
}
