/* Replaces MSVC's <intrin.h>: as_msvc.h has included MinGW's, which lacks these two on Arm. */
#ifdef _M_ARM64
unsigned __int64 __umulh(unsigned __int64, unsigned __int64);
void __prefetch(const void *);
#endif
