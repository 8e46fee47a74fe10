"""The default networks in the units of the data."""

import torch

from otpdag.learned.image_networks import image_decoder, image_encoder, seeded, started_from_data


def networks(width=8):
    return seeded(lambda: image_encoder(1, 4, width), 0), seeded(lambda: image_decoder(1, 4, width), 1)


def test_latents_have_variance_one_and_decoded_images_the_mean_of_the_data():
    images = 0.2 + 0.1 * torch.rand(30, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    encoder, decoder = started_from_data(*networks(), images)
    with torch.no_grad():
        latents = encoder(images)
        assert torch.allclose(latents.mean((0, 2, 3)), torch.zeros(4), atol=1e-4)
        assert abs(latents.std() - 1.0) < 1e-3
        assert torch.allclose(decoder(latents).mean(), images.mean(), atol=1e-4)


def test_images_without_contrast_leave_networks_as_they_are():
    images = torch.zeros(3, 1, 16, 16)
    encoder = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 4, 4))
    before = encoder[0].weight.clone()
    started_from_data(encoder, networks()[1], images)
    assert torch.equal(encoder[0].weight, before)
