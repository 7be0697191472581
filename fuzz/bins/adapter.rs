#![no_main]

kiln_fuzz::program!(adapter);
