/* File mappings in which pages are committed before they are written.
 *
 * The pages of a sparse file are allocated on first access, which raises SIGBUS if no memory is left.
 * `cseq_commit` allocates pages in advance and returns an error code instead.
 *
 * On Windows, `fd` is the handle of a section (handles have 32 significant bits). The pages of a section must
 * be committed before they are read or written.
 */
#ifndef CSEQ_MAP_H
#define CSEQ_MAP_H

#include <string.h>

#include "cseq_atomic.h"

#if defined(_WIN32)
/* winsock2.h includes windows.h. */
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <winsock2.h>
#include <errno.h>
#include <windows.h>
#else
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>
#if defined(__APPLE__)
#include <sys/mount.h>
#endif
#endif

#if defined(_WIN32)
#define CSEQ_HANDLE(fd) ((HANDLE)(intptr_t)(fd))
#define CSEQ_LOW(n) ((DWORD)((n) & 0xffffffffu))
#define CSEQ_HIGH(n) ((DWORD)((n) >> 32))
#endif

/* On Windows, create a section of zeros. Return its handle, or -1 with errno set. */
CSEQ_INLINE int cseq_section(uint64_t nbytes) {
#if defined(_WIN32)
    HANDLE section = CreateFileMappingW(INVALID_HANDLE_VALUE, 0, PAGE_READWRITE | SEC_RESERVE,
                                        CSEQ_HIGH(nbytes), CSEQ_LOW(nbytes), 0);
    if (section == 0) errno = ENOMEM;
    return section == 0 ? -1 : (int)(intptr_t)section;
#else
    (void)nbytes;
    errno = ENOSYS;
    return -1;
#endif
}

/* Map part of a file. Return the address, or NULL with errno set. With `own`, the mapping is private. */
CSEQ_INLINE void *cseq_map(int fd, uint64_t offset, uint64_t nbytes, int own) {
#if defined(_WIN32)
    void *p = MapViewOfFile(CSEQ_HANDLE(fd), own ? FILE_MAP_COPY : FILE_MAP_ALL_ACCESS,
                            CSEQ_HIGH(offset), CSEQ_LOW(offset), (SIZE_T)nbytes);
    if (p == NULL) errno = ENOMEM;
    return p;
#else
    void *p = mmap(0, (size_t)nbytes, PROT_READ | PROT_WRITE, own ? MAP_PRIVATE : MAP_SHARED, fd,
                   (off_t)offset);
    return p == MAP_FAILED ? 0 : p;
#endif
}

/* Return the memory size in bytes on Windows, or 0 if unknown. Elsewhere, return 0; see sysconf. */
CSEQ_INLINE uint64_t cseq_ram(void) {
#if defined(_WIN32)
    MEMORYSTATUSEX status;
    status.dwLength = sizeof(status);
    return GlobalMemoryStatusEx(&status) ? status.ullTotalPhys : 0;
#else
    return 0;
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
    CloseHandle(CSEQ_HANDLE(fd));
#else
    (void)!close(fd);
#endif
}

/* Return `fd` if it is above the standard streams. Otherwise, close it and return a copy above them, or -1
 * with errno set. A C library might print into a file that has the descriptor of a standard stream. */
CSEQ_INLINE int cseq_lift(int fd) {
#if defined(_WIN32)
    return fd;
#else
    int lifted, error;
    if (fd < 0 || fd > 2) return fd;
    lifted = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    error = errno;
    (void)!close(fd);
    errno = error;
    return lifted;
#endif
}

#if !defined(_WIN32)
/* Commit pages by writing zeros. Return 0 or an errno. */
CSEQ_INLINE int cseq_commit_by_zeros(int fd, uint64_t offset, uint64_t nbytes) {
    static const char zeros[1 << 16];
    while (nbytes > 0) {
        size_t most = nbytes < sizeof(zeros) ? (size_t)nbytes : sizeof(zeros);
        ssize_t done = pwrite(fd, zeros, most, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done < 0 ? errno : ENOSPC;
        offset += (uint64_t)done;
        nbytes -= (uint64_t)done;
    }
    return 0;
}
#endif

/* Allocate the pages of [offset, offset + nbytes). Return 0 or an errno.
 *
 * On Windows, a view starts at a multiple of 64 KiB. If a page is committed in one view, it is committed in
 * all views of all processes while the section exists. On macOS, F_PREALLOCATE does not fill holes, so zeros
 * are written, unless they would fill the disk. */
CSEQ_INLINE int cseq_commit(int fd, uint64_t offset, uint64_t nbytes) {
#if defined(_WIN32)
    uint64_t begin = offset & ~(uint64_t)0xffff;
    char *view = (char *)MapViewOfFile(CSEQ_HANDLE(fd), FILE_MAP_ALL_ACCESS, CSEQ_HIGH(begin),
                                       CSEQ_LOW(begin), (SIZE_T)(offset - begin + nbytes));
    void *p = 0;
    if (view != 0) {
        p = VirtualAlloc(view + (offset - begin), (SIZE_T)nbytes, MEM_COMMIT, PAGE_READWRITE);
        UnmapViewOfFile(view);
    }
    return p == 0 ? ENOMEM : 0;
#elif defined(__APPLE__)
    struct statfs disk;
    if (fstatfs(fd, &disk) == 0 && disk.f_blocks && nbytes / disk.f_bsize >= disk.f_bavail)
        return ENOSPC;
    return cseq_commit_by_zeros(fd, offset, nbytes);
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

/* Release the pages of [offset, offset + nbytes). They must be committed again before they are written.
 * Return 0 or an errno. */
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

/* Wait until the peer of a socket is gone. Another thread reads the messages. */
CSEQ_INLINE void cseq_await_hangup(intptr_t socket) {
    char byte;
    for (;;) {
#if defined(_WIN32)
        if (recv((SOCKET)socket, &byte, 1, MSG_PEEK) <= 0) return;
        Sleep(100);
#else
        ssize_t n = recv((int)socket, &byte, 1, MSG_PEEK);
        if (n == 0 || (n < 0 && errno != EINTR)) return;
        if (n > 0) usleep(100000);
#endif
    }
}

#endif
