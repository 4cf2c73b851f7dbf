/* SPDX-License-Identifier: Apache-2.0 */
/* A simulated NVML with the functions that the gpu driver uses, for the real Python binding.
 *
 * Names and arguments are those of the NVML API Reference Guide. There are two GPUs: one with vGPU
 * types, and an old one that supports little. The first one can be in MIG mode. It has seven slices,
 * eight slices of memory, and its GPU instances have compute instances. Outside the MIG mode, it has
 * a heterogeneous mode for vGPUs of different sizes. Calls work between nvmlInit and nvmlShutdown only.
 */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, SMALL = 7, NOT_LOADED = 9 };
enum { NO_RESOURCES = 23, IN_USE = 19, VERSION = 25, LOST = 15, PROFILES = 4, SLICES = 7 };
typedef struct {
    unsigned version, id, p2p, slices, instances, counts[6];
    unsigned long long megabytes;
    char name[96];
} Profile;
typedef struct { unsigned version, id, slices, instances, counts[6]; char name[96]; } ComputeProfile;
typedef struct { int used, profile, computes; unsigned start; } Instance;
typedef struct { unsigned start, size; } Placement;
typedef struct { unsigned long long total, free, used; } Memory;
static const char *const names[] = {"NVIDIA A40-12Q", "NVIDIA A40-24Q"};
/* In MIG mode: types 1001 to 1003, each for the profile of its index. The last profile has none, and
 * is one only after set_profiles(4). */
static const char *const mig_names[] = {"GRID A100-1-10C", "GRID A100-2-20C", "GRID A100-7-80C"};
static const unsigned ids[PROFILES] = {19, 14, 0, 9}, slices[PROFILES] = {1, 2, 7, 3};
static const unsigned limits[PROFILES] = {7, 3, 1, 2}, indices[PROFILES] = {0, 1, 4, 2};
static const unsigned sizes[PROFILES] = {1, 2, 8, 4}; /* in memory; each starts at a multiple */
static const char *const profile_names[] = {"MIG 1g.10gb", "MIG 2g.20gb", "MIG 7g.80gb", "MIG 3g.40gb"};
static int profiles = 3, placing = 1;
static Instance instances[SLICES];
static int opened, broken, mig, busy, failing, gpus[2], heterogeneous, vgpus, ignoring;
static int pending, activation, querying;
typedef struct { unsigned version, value; } Mode;
typedef struct { unsigned version, type, count; } MaxInstances;
int reads; /* of GPUs, for the test */

int count_opened(void) { return opened; }
void set_broken(int value) { broken = value; }
void set_mig(int value)
{
    mig = pending = value, activation = querying = 0;
    memset(instances, 0, sizeof instances);
    busy = failing = 0;
}

/* Status of a change of the MIG mode, which stays pending unless it is 0; whether the profiles are
 * described outside the MIG mode. */
void set_activation(int value) { activation = value; }
void set_querying(int value) { querying = value; }
void reset_gpu(void) { mig = pending; }
int get_pending(void) { return pending; }
void set_busy(int value) { busy = value; }       /* a process uses the instances */
void set_failing(int value) { failing = value; } /* this many creations succeed, if not 0 */

/* Number of profiles, and whether NVML knows their placements. */
void set_profiles(int value) { profiles = value; }
void set_placing(int value) { placing = value; }

/* Whether the caller may not list GPU instances. */
static int unprivileged;
void set_unprivileged(int value) { unprivileged = value; }

/* The GPU is lost at the call of this number after the one for its handle, if it is not 0. */
static int lost, calls;
void set_lost(int number) { lost = number; }
static int is_lost(void) { return lost && ++calls >= lost; }

/* Number of vGPUs, and whether a change of the heterogeneous mode has no effect (no SR-IOV). */
void set_vgpus(int value) { vgpus = value; heterogeneous = 0; }
void set_ignoring(int value) { ignoring = value; }

int count_instances(unsigned profile)
{
    int count = 0;
    for (int number = 0; number < SLICES; number++)
        count += instances[number].used && ids[instances[number].profile] == profile
                 && instances[number].computes == 1;
    return count;
}
int nvmlInitWithFlags(unsigned flags) { (void)flags; return broken ? NOT_LOADED : (opened++, SUCCESS); }
int nvmlShutdown(void) { return opened ? (opened--, SUCCESS) : UNINITIALIZED; }

const char *nvmlErrorString(int code)
{
    return code == NOT_LOADED ? "Driver Not Loaded" : code == IN_USE ? "In use by another client"
           : code == NO_RESOURCES ? "Insufficient Resources"
           : code == LOST ? "GPU is lost" : "Not Found";
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device)
{
    if (!opened) return UNINITIALIZED;
    reads++, calls = 0;
    for (int number = 0; number < 2; number++)
        if (!strcmp(address, number ? "0000:5e:00.0" : "0000:3d:00.0"))
            return (*device = &gpus[number], SUCCESS);
    return NOT_FOUND;
}

static int modern(const void *device) { return opened && device == &gpus[0]; }

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length)
{
    if (is_lost()) return LOST;
    snprintf(uuid, length, "GPU-%08d-0000-0000-0000-000000000000", modern(device));
    return SUCCESS;
}

int nvmlDeviceGetVbiosVersion(void *device, char *version, unsigned length)
{
    if (is_lost()) return LOST;
    snprintf(version, length, "94.02.5C.00.01");
    return modern(device) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory)
{
    if (is_lost()) return LOST;
    (void)device;
    memory->total = 48305799168ULL;
    return opened ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetEccMode(void *device, unsigned *current, unsigned *pending)
{
    if (is_lost()) return LOST;
    *current = 1, *pending = 0;
    return modern(device) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *next)
{
    if (is_lost()) return LOST;
    *current = mig, *next = pending;
    return modern(device) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceSetMigMode(void *device, unsigned mode, unsigned *status)
{
    if (!modern(device)) return NOT_SUPPORTED;
    pending = mode;
    if (!activation) mig = pending;
    *status = mig == pending ? SUCCESS : activation;
    return SUCCESS;
}

int nvmlDeviceGetSupportedVgpus(void *device, unsigned *count, unsigned *types)
{
    if (is_lost()) return LOST;
    if (!modern(device)) return NOT_SUPPORTED;
    if (*count < 2u + mig) return (*count = 2 + mig, SMALL);
    if (mig) types[0] = 1001, types[1] = 1002, types[2] = 1003;
    else types[0] = 561, types[1] = 563;
    *count = 2 + mig;
    return SUCCESS;
}

int nvmlVgpuTypeGetGpuInstanceProfileId(unsigned type, unsigned *profile)
{
    if (is_lost()) return LOST;
    *profile = type > 1000 ? ids[type - 1001] : 0xFFFFFFFF;
    return SUCCESS;
}

int nvmlVgpuTypeGetMaxInstancesPerGpuInstance(MaxInstances *found)
{
    if (is_lost()) return LOST;
    if (found->version != (sizeof *found | 1 << 24)) return VERSION;
    if (found->type <= 1000) return NOT_SUPPORTED;
    return (found->count = found->type == 1003 ? 2 : 1, SUCCESS);
}

int nvmlVgpuTypeGetFramebufferSize(unsigned type, unsigned long long *size)
{
    if (is_lost()) return LOST;
    *size = (type > 1000 ? 10ULL : type == 561 ? 12ULL : 24ULL) << 30;
    return SUCCESS;
}

int nvmlDeviceGetVgpuHeterogeneousMode(void *device, Mode *mode)
{
    if (is_lost()) return LOST;
    if (mode->version != (sizeof *mode | 1 << 24)) return VERSION;
    if (!modern(device) || mig) return NOT_SUPPORTED;
    return (mode->value = heterogeneous, SUCCESS);
}

int nvmlDeviceSetVgpuHeterogeneousMode(void *device, const Mode *mode)
{
    if (mode->version != (sizeof *mode | 1 << 24)) return VERSION;
    if (!modern(device) || mig) return NOT_SUPPORTED;
    if (vgpus) return IN_USE;
    if (!ignoring) heterogeneous = mode->value;
    return SUCCESS;
}

int nvmlVgpuTypeGetName(unsigned type, char *name, unsigned *length)
{
    if (is_lost()) return LOST;
    snprintf(name, *length, "%s", type > 1000 ? mig_names[type - 1001] : names[type == 563]);
    return SUCCESS;
}

int nvmlVgpuTypeGetMaxInstances(void *device, unsigned type, unsigned *count)
{
    if (is_lost()) return LOST;
    *count = type > 1000 ? limits[type - 1001] : type == 561 ? 4 : 2;
    return modern(device) ? SUCCESS : INVALID;
}

/* As cards of their own: bridges with two links between the GPUs. As GPUs of a baseboard: links to
 * an NVSwitch, and module ids. */
static int bridged = 1, module;
void set_bridged(int value) { bridged = value; }
void set_module(int value) { module = value; }

int nvmlDeviceGetModuleId(void *device, unsigned *id)
{
    if (is_lost()) return LOST;
    *id = module;
    return opened && device ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active)
{
    if (is_lost()) return LOST;
    if (link >= 4) return INVALID;
    *active = link > 1 || bridged;
    return opened && device ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type)
{
    if (is_lost()) return LOST;
    *type = link < 2 ? 0 : 2;
    return opened && device ? SUCCESS : UNINITIALIZED;
}

typedef struct { char old[16]; unsigned domain, bus, device, ids, subsystem; char address[32]; } Pci;
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, Pci *pci)
{
    if (is_lost()) return LOST;
    memset(pci, 0, sizeof *pci);
    pci->bus = link > 1 ? 0xc0 : modern(device) ? 0x5e : 0x3d;
    return link < 4 ? SUCCESS : INVALID;
}

/* The first GPU has a speed of each link, and the old one only one of all its links. */
typedef struct {
    unsigned field, scope;
    long long time, latency;
    int type, code;
    union { unsigned number; double fraction; } value;
} FieldValue;
int nvmlDeviceGetFieldValues(void *device, int count, FieldValue *values)
{
    if (is_lost()) return LOST;
    if (!opened || !device) return UNINITIALIZED;
    for (FieldValue *value = values; value < values + count; value++) {
        int is_common = value->field == 90, is_link = value->field == 164;
        value->type = 1;
        value->code = (modern(device) ? is_link : is_common) ? SUCCESS : NOT_SUPPORTED;
        value->value.number = is_common ? 25781 : value->scope ? 26562 : 53125;
    }
    return SUCCESS;
}

static int find(const unsigned *values, unsigned value)
{
    for (int number = 0; number < profiles; number++)
        if (values[number] == value) return number;
    return -1;
}

int nvmlDeviceGetGpuInstanceProfileInfoV(void *device, unsigned index, Profile *profile)
{
    if (is_lost()) return LOST;
    int number = find(indices, index);
    if (!modern(device) || !(mig || querying) || number < 0) return NOT_SUPPORTED;
    profile->id = ids[number], profile->slices = slices[number];
    profile->instances = limits[number];
    snprintf(profile->name, sizeof profile->name, "%s", profile_names[number]);
    return SUCCESS;
}

int nvmlDeviceGetGpuInstances(void *device, unsigned profile, Instance **found, unsigned *count)
{
    if (is_lost()) return LOST;
    if (!modern(device)) return INVALID;
    if (unprivileged) return NO_PERMISSION;
    *count = 0;
    for (int number = 0; number < SLICES; number++)
        if (instances[number].used && ids[instances[number].profile] == profile)
            found[(*count)++] = &instances[number];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    void *device, unsigned profile, Placement *found, unsigned *count)
{
    int number = find(ids, profile);
    if (!modern(device) || number < 0) return INVALID;
    if (!placing) return NOT_SUPPORTED;
    if (found && *count < limits[number]) return SMALL;
    *count = limits[number];
    for (unsigned place = 0; found && place < *count; place++)
        found[place].start = place * sizes[number], found[place].size = sizes[number];
    return SUCCESS;
}

static int is_free(unsigned start, unsigned size)
{
    for (Instance *other = instances; other < instances + SLICES; other++)
        if (other->used && other->start < start + size
            && start < other->start + sizes[other->profile]) return 0;
    return 1;
}

static int create(int number, unsigned start, Instance **created)
{
    if (!is_free(start, sizes[number]) || (failing && !--failing)) return NO_RESOURCES;
    for (Instance *instance = instances; instance < instances + SLICES; instance++)
        if (!instance->used) {
            *instance = (Instance){1, number, 0, start};
            return (*created = instance, SUCCESS);
        }
    return NO_RESOURCES;
}

int nvmlDeviceCreateGpuInstanceWithPlacement(
    void *device, unsigned profile, const Placement *placement, Instance **created)
{
    int number = find(ids, profile);
    if (!modern(device) || number < 0 || placement->size != sizes[number]
        || placement->start % sizes[number]
        || placement->start / sizes[number] >= limits[number]) return INVALID;
    return create(number, placement->start, created);
}

/* At the first free place. */
int nvmlDeviceCreateGpuInstance(void *device, unsigned profile, Instance **created)
{
    int number = find(ids, profile);
    if (!modern(device) || number < 0) return INVALID;
    for (unsigned place = 0; place < limits[number]; place++)
        if (is_free(place * sizes[number], sizes[number]))
            return create(number, place * sizes[number], created);
    return NO_RESOURCES;
}

int nvmlGpuInstanceDestroy(Instance *instance)
{
    if (instance->computes) return IN_USE;
    return (instance->used = 0, SUCCESS);
}

int nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    Instance *instance, unsigned index, unsigned engines, ComputeProfile *profile)
{
    int number = find(indices, index);
    if (engines || number < 0 || slices[number] > slices[instance->profile]) return NOT_SUPPORTED;
    profile->id = 100 + number, profile->slices = slices[number];
    profile->instances = slices[instance->profile] / slices[number];
    return SUCCESS;
}

int nvmlGpuInstanceGetComputeInstances(
    Instance *instance, unsigned profile, Instance **found, unsigned *count)
{
    *count = 0;
    if (instance->computes && profile == 100u + instance->profile) found[(*count)++] = instance;
    return SUCCESS;
}

int nvmlGpuInstanceCreateComputeInstance(Instance *instance, unsigned profile, Instance **created)
{
    if (profile != 100u + instance->profile || instance->computes) return NO_RESOURCES;
    instance->computes = 1;
    return (*created = instance, SUCCESS);
}

int nvmlComputeInstanceDestroy(Instance *compute)
{
    if (busy) return IN_USE;
    return (compute->computes = 0, SUCCESS);
}
