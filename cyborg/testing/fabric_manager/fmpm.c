/* SPDX-License-Identifier: Apache-2.0 */
/* A double of fmpm 1.0.1 of NVIDIA's Fabric-Manager-Client, on the double of libnvfm.so.1.
 *
 * Options, output and exit status are those of fmpm.cpp: the exit status is the returned value, and
 * the list of --set-activated-list is empty whatever the argument is, as in that release.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvfm.h"

static fmReturn_t show(fmHandle_t handle)
{
    static fmFabricPartitionList_t list;
    list.version = MAKE_FM_PARAM_VERSION(fmFabricPartitionList_t, 1);
    fmReturn_t code = fmGetSupportedFabricPartitions(handle, &list);
    if (code) return (printf("Failed to get partition list. fmReturn: %d\n", code), code);
    printf("{\"maxNumPartitions\" : %u, \"numPartitions\" : %u,\n \"partitionInfo\" : [",
           list.maxNumPartitions, list.numPartitions);
    for (unsigned index = 0; index < list.numPartitions; index++) {
        fmFabricPartitionInfo_t *info = &list.partitionInfo[index];
        printf("%s\n  {\"gpuInfo\" : [", index ? "," : "");
        for (unsigned gpu = 0; gpu < info->numGpus; gpu++) {
            fmFabricPartitionGpuInfo_t *item = &info->gpuInfo[gpu];
            printf("%s\n   {\"maxNumNvLinks\" : %u, \"numNvLinksAvailable\" : %u, "
                   "\"nvlinkLineRateMBps\" : %u, \"pciBusId\" : \"%s\", \"physicalId\" : %u, "
                   "\"uuid\" : \"%s\"}",
                   gpu ? "," : "", item->maxNumNvLinks, item->numNvLinksAvailable,
                   item->nvlinkLineRateMBps, item->pciBusId, item->physicalId, item->uuid);
        }
        printf("],\n   \"isActive\" : %u, \"numGpus\" : %u, \"partitionId\" : %u}",
               info->isActive, info->numGpus, info->partitionId);
    }
    printf("],\n \"version\" : %u}\n", list.version);
    return code;
}

int main(int argc, char **argv)
{
    fmConnectParams_v1 parameters = {.timeoutMs = 1000};
    fmActivatedFabricPartitionList_t none = {.numPartitions = 0};
    fmHandle_t handle;
    const char *operation = "", *argument = "";
    snprintf(parameters.addressInfo, FM_MAX_STR_LENGTH, "127.0.0.1");
    for (int index = 1; index < argc; index++) {
        if (!strcmp(argv[index], "-l")) {
            operation = argv[index];
            continue;
        }
        if (index + 1 >= argc) return (fprintf(stderr, "Invalid argument.\n"), FM_ST_BADPARAM);
        if (!strcmp(argv[index], "--hostname") || !strcmp(argv[index], "--unix-domain-socket")) {
            parameters.addressIsUnixSocket = argv[index][2] == 'u';
            snprintf(parameters.addressInfo, FM_MAX_STR_LENGTH, "%s", argv[++index]);
        } else {
            operation = argv[index], argument = argv[++index];
        }
    }
    parameters.version = MAKE_FM_PARAM_VERSION(fmConnectParams_v1, 1);
    none.version = MAKE_FM_PARAM_VERSION(fmActivatedFabricPartitionList_t, 1);
    fmReturn_t code = fmLibInit();
    if (code || (code = fmConnect(&parameters, &handle)))
        return (printf("Failed to connect to Fabric Manager instance.\n"), code);
    if (!strcmp(operation, "-l")) return show(handle);
    if (!strcmp(operation, "-a")) code = fmActivateFabricPartition(handle, (unsigned)atoi(argument));
    if (!strcmp(operation, "-d"))
        code = fmDeactivateFabricPartition(handle, (unsigned)atoi(argument));
    if (!strcmp(operation, "--set-activated-list"))
        code = fmSetActivatedFabricPartitions(handle, &none);
    if (code) printf("%s failed. fmReturn: %d\n", operation, code);
    return code;
}
