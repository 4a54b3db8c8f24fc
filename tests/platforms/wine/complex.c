/* The complex functions of Windows' C runtime, whose complex types are structs and whose long double
 * is a double. By the textbook's formulas: exact enough for numpy to start, no more. */
#include <math.h>

#define EXPORT __declspec(dllexport)

typedef struct { float re, im; } F;  /* _Fcomplex */
typedef struct { double re, im; } D; /* _Dcomplex, and _Lcomplex */

static D wide(F z) { return (D){z.re, z.im}; }
static F narrow(D z) { return (F){(float)z.re, (float)z.im}; }

static double creal_(D z) { return z.re; }
static double cimag_(D z) { return z.im; }
static double cabs_(D z) { return hypot(z.re, z.im); }
static double carg_(D z) { return atan2(z.im, z.re); }

static D cexp_(D z) { return (D){exp(z.re) * cos(z.im), exp(z.re) * sin(z.im)}; }
static D ccosh_(D z) { return (D){cosh(z.re) * cos(z.im), sinh(z.re) * sin(z.im)}; }
static D csinh_(D z) { return (D){sinh(z.re) * cos(z.im), cosh(z.re) * sin(z.im)}; }

static D ctanh_(D z) {
    double scale = cosh(2 * z.re) + cos(2 * z.im);
    if (fabs(z.re) > 350) return (D){copysign(1, z.re), 0}; /* cosh overflows */
    return (D){sinh(2 * z.re) / scale, sin(2 * z.im) / scale};
}

/* cos z = cosh iz, sin z = -i sinh iz, tan z = -i tanh iz */
static D turned(D z) { return (D){-z.im, z.re}; }
static D turned_back(D z) { return (D){z.im, -z.re}; }
static D ccos_(D z) { return ccosh_(turned(z)); }
static D csin_(D z) { return turned_back(csinh_(turned(z))); }
static D ctan_(D z) { return turned_back(ctanh_(turned(z))); }

static D cpow_(D base, D power) {
    double log_abs = log(cabs_(base)), angle = carg_(base);
    if (power.re == 0 && power.im == 0) return (D){1, 0};
    if (base.re == 0 && base.im == 0) return (D){0, 0};
    return cexp_((D){power.re * log_abs - power.im * angle, power.re * angle + power.im * log_abs});
}

#define TO_REAL(name)                                                      \
    EXPORT float own_##name##f(F z) { return (float)name##_(wide(z)); }    \
    EXPORT double own_##name(D z) { return name##_(z); }                   \
    EXPORT double own_##name##l(D z) { return name##_(z); }

#define TO_COMPLEX(name)                                                   \
    EXPORT F own_##name##f(F z) { return narrow(name##_(wide(z))); }       \
    EXPORT D own_##name(D z) { return name##_(z); }                        \
    EXPORT D own_##name##l(D z) { return name##_(z); }

TO_REAL(creal) TO_REAL(cimag) TO_REAL(cabs) TO_REAL(carg)
TO_COMPLEX(cexp) TO_COMPLEX(ccosh) TO_COMPLEX(csinh) TO_COMPLEX(ctanh)
TO_COMPLEX(ccos) TO_COMPLEX(csin) TO_COMPLEX(ctan)

EXPORT F own_cpowf(F a, F b) { return narrow(cpow_(wide(a), wide(b))); }
EXPORT D own_cpow(D a, D b) { return cpow_(a, b); }
EXPORT D own_cpowl(D a, D b) { return cpow_(a, b); }
