#![no_main]

kiln_fuzz::program!(webp);
