// What variants written for FlashInfer include.
#pragma once

#include <flashinfer/attention/variant.h>
