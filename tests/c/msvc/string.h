/* Stands in for the C library's <string.h>, which is not there for a freestanding compiler. */
#include <stddef.h>
void *memcpy(void *, const void *, size_t);
void *memset(void *, int, size_t);
