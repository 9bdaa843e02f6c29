#pragma once
#include "machine.h"
