/* What the headers have for macOS alone, where files are concerned; see darwin.h.
 *
 *   darwin FOLDER
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "cseq_map.h"

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
    puts("ok");
    return 0;
}
