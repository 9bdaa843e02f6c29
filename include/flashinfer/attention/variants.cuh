// The header that variants written for FlashInfer include.
#pragma once

#include <flashinfer/attention/variants.h>
