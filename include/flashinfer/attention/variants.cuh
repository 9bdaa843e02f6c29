// What variants written for FlashInfer include.
#pragma once

#include <flashinfer/attention/variants.h>
