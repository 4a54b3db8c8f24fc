/* Shared mappings of a file, and pages committed before they are written.
 *
 * A sparse file's pages are allocated on first touch, and when there is no room that touch
 * is SIGBUS. `cseq_commit` allocates them beforehand, where running out is an error code.
 */
#ifndef CSEQ_MAP_H
#define CSEQ_MAP_H

#include <string.h>

#include "cseq_atomic.h"

#if defined(_WIN32)
#include <winsock2.h>
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <errno.h>
#include <io.h>
#include <windows.h>
#else
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>
#endif

/* Address of a shared mapping, or NULL with errno set. */
CSEQ_INLINE void *cseq_map(int fd, uint64_t offset, uint64_t nbytes, int populate) {
#if defined(_WIN32)
    uint64_t end = offset + nbytes;
    HANDLE file = (HANDLE)_get_osfhandle(fd);
    HANDLE section = CreateFileMappingA(file, NULL, PAGE_READWRITE, (DWORD)(end >> 32), (DWORD)end, NULL);
    void *p = NULL;
    (void)populate;
    if (section != NULL) {
        p = MapViewOfFile(section, FILE_MAP_ALL_ACCESS, (DWORD)(offset >> 32), (DWORD)offset,
                          (SIZE_T)nbytes);
        CloseHandle(section); /* the view keeps it */
    }
    if (p == NULL) errno = ENOMEM;
    return p;
#else
    void *p = mmap(0, (size_t)nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    if (p == MAP_FAILED) return 0;
#if defined(__linux__)
    /* MADV_POPULATE_WRITE (5.14): page tables now, in one go. Without it, at first touch. */
    if (populate) (void)!madvise(p, (size_t)nbytes, 23);
#else
    (void)populate;
#endif
    return p;
#endif
}

CSEQ_INLINE void cseq_unmap(void *p, uint64_t nbytes) {
#if defined(_WIN32)
    (void)nbytes;
    UnmapViewOfFile(p);
#else
    munmap(p, (size_t)nbytes);
#endif
}

CSEQ_INLINE void cseq_close(int fd) {
#if defined(_WIN32)
    _close(fd);
#else
    (void)!close(fd);
#endif
}

/* Allocate the pages of [offset, offset + nbytes): 0, or an errno. */
CSEQ_INLINE int cseq_commit(int fd, uint64_t offset, uint64_t nbytes) {
#if defined(_WIN32)
    (void)fd, (void)offset, (void)nbytes; /* mapping a section commits it */
    return 0;
#elif defined(__APPLE__)
    fstore_t want = {F_ALLOCATEALL, F_PEOFPOSMODE, 0, (off_t)nbytes, 0};
    (void)offset;
    return fcntl(fd, F_PREALLOCATE, &want) == 0 || errno == ENOTSUP ? 0 : errno;
#else
    int error;
    do {
#if defined(__linux__)
        error = fallocate(fd, 0, (off_t)offset, (off_t)nbytes) == 0 ? 0 : errno;
#else
        error = posix_fallocate(fd, (off_t)offset, (off_t)nbytes);
#endif
    } while (error == EINTR);
    return error;
#endif
}

/* Give the pages of [offset, offset + nbytes) back; they read as zeros, and must be committed before
 * they are written again. 0, or an errno: nothing was given back then. */
CSEQ_INLINE int cseq_punch(int fd, uint64_t offset, uint64_t nbytes) {
#if defined(__linux__)
    int error;
    do {
        error = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                          (off_t)nbytes) == 0 ? 0 : errno;
    } while (error == EINTR);
    return error;
#else
    (void)fd, (void)offset, (void)nbytes;
    return ENOSYS;
#endif
}

/* Blocks until the peer of a socket is gone. Needs no interpreter. */
CSEQ_INLINE void cseq_await_hangup(intptr_t socket) {
    char byte;
    for (;;) {
#if defined(_WIN32)
        if (recv((SOCKET)socket, &byte, 1, MSG_PEEK) <= 0) return;
        Sleep(100);
#else
        ssize_t n = recv((int)socket, &byte, 1, MSG_PEEK);
        if (n == 0 || (n < 0 && errno != EINTR)) return;
        if (n > 0) usleep(100000); /* a message for another thread, not yet read */
#endif
    }
}

#endif
