// The header that variants written for FlashInfer include.
#pragma once

#include <flashinfer/attention/hopper_form.h>
#include <flashinfer/attention/variant.h>
