// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * QEMU's PCI device "edu" as an FPGA card: a manager, a bridge and a region of Linux's FPGA classes.
 *
 * The manager has the attribute "firmware", as in kernels of vendors (linux-xlnx): a file name that
 * is written to it is loaded into the region. An image is a function of 16 bytes, a mode of 16 bytes
 * and content. The mode "refuse" fails before the old function is lost, and "fail" after that. The
 * attribute "function" of the region, which no real card has, shows the loaded function and whether
 * the bridge lets traffic through.
 */
#include <linux/fpga/fpga-bridge.h>
#include <linux/fpga/fpga-mgr.h>
#include <linux/fpga/fpga-region.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/string.h>

#define FUNCTION_SIZE 16
#define HEADER_SIZE 32

struct card {
	struct fpga_manager *manager;
	struct fpga_bridge *bridge;
	struct fpga_region *region;
	struct fpga_compat_id interface;
	u8 function[FUNCTION_SIZE];
	bool traffic;
};

static enum fpga_mgr_states read_state(struct fpga_manager *manager)
{
	return FPGA_MGR_STATE_OPERATING;
}

static bool has_mode(const char *image, const char *mode)
{
	return !strncmp(image + FUNCTION_SIZE, mode, strlen(mode));
}

static int begin(struct fpga_manager *manager, struct fpga_image_info *info, const char *image,
		 size_t size)
{
	return has_mode(image, "refuse") ? -EINVAL : 0;
}

static int load(struct fpga_manager *manager, const char *image, size_t size)
{
	struct card *card = manager->priv;

	memset(card->function, 0, FUNCTION_SIZE);
	if (size < HEADER_SIZE || has_mode(image, "fail"))
		return -EIO;
	memcpy(card->function, image, FUNCTION_SIZE);
	return 0;
}

static int complete_load(struct fpga_manager *manager, struct fpga_image_info *info)
{
	return 0;
}

static const struct fpga_manager_ops manager_ops = {
	.initial_header_size = HEADER_SIZE,
	.state = read_state,
	.write_init = begin,
	.write = load,
	.write_complete = complete_load,
};

static int set_traffic(struct fpga_bridge *bridge, bool enable)
{
	struct card *card = bridge->priv;

	card->traffic = enable;
	return 0;
}

static const struct fpga_bridge_ops bridge_ops = { .enable_set = set_traffic };

static int add_bridge(struct fpga_region *region)
{
	return fpga_bridge_get_to_list(region->dev.parent, region->info, &region->bridge_list);
}

static ssize_t firmware_store(struct device *dev, struct device_attribute *attribute,
			      const char *text, size_t size)
{
	struct card *card = to_fpga_manager(dev)->priv;
	struct fpga_image_info *info = fpga_image_info_alloc(dev);
	int error = -ENOMEM;

	if (!info)
		return error;
	info->firmware_name = devm_kasprintf(dev, GFP_KERNEL, "%.*s",
					     (int)strcspn(text, "\n"), text);
	if (info->firmware_name) {
		card->region->info = info;
		error = fpga_region_program_fpga(card->region);
		fpga_bridges_put(&card->region->bridge_list);
		card->region->info = NULL;
	}
	fpga_image_info_free(info);
	return error ? error : size;
}

static DEVICE_ATTR_WO(firmware);

static ssize_t function_show(struct device *dev, struct device_attribute *attribute, char *text)
{
	struct card *card = to_fpga_region(dev)->priv;

	return sysfs_emit(text, "%*phN %s\n", FUNCTION_SIZE, card->function,
			  card->traffic ? "on" : "off");
}

static DEVICE_ATTR_RO(function);

static int probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct card *card = devm_kzalloc(&pdev->dev, sizeof(*card), GFP_KERNEL);
	struct fpga_region_info region = { .get_bridges = add_bridge };
	int error;

	if (!card)
		return -ENOMEM;
	memset(card->function, 0x11, FUNCTION_SIZE);
	card->traffic = true;
	card->interface.id_h = 0x69528db6eb31577aULL;
	card->interface.id_l = 0x8c3668f9faa081f6ULL;
	card->manager = fpga_mgr_register(&pdev->dev, "edu FPGA manager", &manager_ops, card);
	if (IS_ERR(card->manager))
		return PTR_ERR(card->manager);
	card->bridge = fpga_bridge_register(&pdev->dev, "edu FPGA bridge", &bridge_ops, card);
	if (IS_ERR(card->bridge)) {
		error = PTR_ERR(card->bridge);
		goto remove_manager;
	}
	region.mgr = card->manager;
	region.compat_id = &card->interface;
	region.priv = card;
	card->region = fpga_region_register_full(&pdev->dev, &region);
	if (IS_ERR(card->region)) {
		error = PTR_ERR(card->region);
		goto remove_bridge;
	}
	pci_set_drvdata(pdev, card);
	error = device_create_file(&card->manager->dev, &dev_attr_firmware);
	if (!error)
		error = device_create_file(&card->region->dev, &dev_attr_function);
	if (!error)
		return 0;
	fpga_region_unregister(card->region);
remove_bridge:
	fpga_bridge_unregister(card->bridge);
remove_manager:
	fpga_mgr_unregister(card->manager);
	return error;
}

static void remove_card(struct pci_dev *pdev)
{
	struct card *card = pci_get_drvdata(pdev);

	fpga_region_unregister(card->region);
	fpga_bridge_unregister(card->bridge);
	fpga_mgr_unregister(card->manager);
}

static const struct pci_device_id ids[] = { { PCI_DEVICE(0x1234, 0x11e8) }, {} };
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver card_driver = {
	.name = "edufpga",
	.id_table = ids,
	.probe = probe,
	.remove = remove_card,
};
module_pci_driver(card_driver);

MODULE_DESCRIPTION("FPGA card of the lab");
MODULE_LICENSE("GPL");
