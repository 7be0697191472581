//! The real driver, through cudarc's bindings of the driver API. The library is opened when kiln first needs a GPU, so the program also
//! runs on machines without one.
#![allow(unsafe_code)]

use super::driver::{DeviceInfo, Driver, Event, Function, Graph, Launch, MapSpec, Module, Rows, Stream, Swizzle};
use crate::error::{Error, Remedy, Result};
use crate::files;
use crate::tensor::DType;
use crate::trace;
use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};
use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::time::Duration;

/// The CUDA version that the kernels are compiled with, which the driver has to support.
const DRIVER: (u32, u32) = (13, 0);
/// The lowest compute capability that kernels are compiled for.
pub const CAPABILITY: (u32, u32) = (8, 0);

/// One GPU, used through its primary context.
pub struct System {
    device: DeviceInfo,
    handle: sys::CUdevice,
}

/// Turns a status into an error that names the call.
fn check(call: &'static str, status: CUresult) -> Result<()> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(Error::Device { call, status: describe(status) }),
    }
}

/// A status as `NAME: text`.
fn describe(status: CUresult) -> String {
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: both calls take any status and give a static string, or leave the pointer null.
    let parts = unsafe {
        let _ = sys::cuGetErrorName(status, &mut name);
        let _ = sys::cuGetErrorString(status, &mut text);
        [name, text].map(|s| if s.is_null() { "unknown".into() } else { CStr::from_ptr(s).to_string_lossy().into_owned() })
    };
    parts.join(": ")
}

fn no_gpu(what: impl Into<String>, hint: impl Into<Remedy>) -> Error {
    Error::NoGpu { what: what.into(), hint: hint.into() }
}

/// Whether the driver is installed. It may still not start.
pub fn has_driver() -> bool {
    // SAFETY: only tries to open the library.
    unsafe { sys::is_culib_present() }
}

/// Opens the driver. Returns the newest CUDA version that it supports, or why it cannot be used.
fn driver() -> Result<(u32, u32)> {
    let _span = trace::span("start the driver");
    if !has_driver() {
        return Err(no_gpu("the NVIDIA driver is not installed (libcuda was not found)", "install the driver of an NVIDIA GPU"));
    }
    let mut version = 0;
    // SAFETY: may be called before anything else. From here on the library is loaded; a driver this old has these symbols too.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    let version = (version as u32 / 1000, version as u32 % 1000 / 10);
    if version < DRIVER {
        let what = format!("the driver supports CUDA {}.{}, this kiln needs {}.{}", version.0, version.1, DRIVER.0, DRIVER.1);
        return Err(no_gpu(what, "update the NVIDIA driver to version 580 or newer"));
    }
    // SAFETY: no pointers.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => Ok(version),
        CUresult::CUDA_ERROR_NO_DEVICE => Err(no_gpu("the NVIDIA driver finds no GPU", "see what nvidia-smi says")),
        status => Err(no_gpu(format!("the NVIDIA driver does not start: {}", describe(status)), "see what nvidia-smi says")),
    }
}

fn attribute(device: sys::CUdevice, attribute: CUdevice_attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: `value` outlives the call.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value as u32)
}

fn describe_device(index: usize, driver: (u32, u32)) -> Result<(DeviceInfo, sys::CUdevice)> {
    let (mut device, mut name, mut uuid, mut memory) = (0, [0; 256], sys::CUuuid { bytes: [0; 16] }, 0);
    // SAFETY: the pointers are to locals, and the length is the array's.
    unsafe {
        check("cuDeviceGet", sys::cuDeviceGet(&mut device, index as i32))?;
        check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device))?;
        check("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(&mut uuid, device))?;
        check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&mut memory, device))?;
    }
    let get = |a| attribute(device, a);
    let capability = (
        get(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        get(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let multiprocessors = get(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let shared = get(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let clock = get(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
    let bytes = name.map(|c| c as u8);
    let name = CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let (uuid, memory) = (uuid.bytes.map(|byte| byte as u8), memory as u64);
    Ok((DeviceInfo { index, name, uuid, capability, multiprocessors, shared, clock, memory, driver }, device))
}

/// The release of the NVIDIA driver. `None` without a driver, or if it does not tell, as on systems other than Linux.
pub fn driver_release() -> Option<String> {
    const FILE: &str = "/proc/driver/nvidia/version";
    const LIMIT: u64 = 4096;
    release_in(&String::from_utf8(files::read(Path::new(FILE), LIMIT).ok()?).ok()?)
}

/// The first word that consists of numbers with points between them.
fn release_in(text: &str) -> Option<String> {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let is_release = |word: &&str| word.contains('.') && word.split('.').all(is_number);
    text.split_whitespace().find(is_release).map(str::to_owned)
}

/// All GPUs, or why there are none.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    let version = driver()?;
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    (0..count as usize).map(|index| Ok(describe_device(index, version)?.0)).collect()
}

impl System {
    /// Makes a GPU's primary context current on this thread.
    pub fn open(index: usize) -> Result<Self> {
        let version = driver()?;
        let count = devices()?.len();
        if index >= count {
            let what = format!("there is no GPU {index}: {count} found");
            return Err(no_gpu(what, Remedy::ListGpus));
        }
        let (device, handle) = describe_device(index, version)?;
        let (major, minor) = device.capability;
        if device.capability < CAPABILITY {
            let what =
                format!("found {} (compute {major}.{minor}), need {}.{} or newer", device.name, CAPABILITY.0, CAPABILITY.1);
            return Err(no_gpu(what, "kiln runs on RTX 30 and newer, A100 and newer, and on the CPU"));
        }
        let _span = trace::span("create the context");
        let mut context = null_mut();
        // SAFETY: `context` outlives the calls; the primary context is released when this is dropped.
        unsafe {
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut context, handle))?;
            let system = Self { device, handle };
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            Ok(system)
        }
    }

    /// Makes the GPU report the properties of another one, to test that GPU's kernels in a build for this one.
    #[cfg(feature = "internals")]
    pub fn with_capability(self, device: DeviceInfo) -> Self {
        // Dropping `self` would release the context.
        let this = std::mem::ManuallyDrop::new(self);
        Self { device, handle: this.handle }
    }
}

impl Drop for System {
    fn drop(&mut self) {
        // SAFETY: retained in `open`. A failure leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
    }
}

fn create_event(flags: sys::CUevent_flags) -> Result<Event> {
    let mut event = null_mut();
    // SAFETY: `event` outlives the call.
    check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags as u32) })?;
    Ok(Event(event as u64))
}

fn stream_of(stream: Stream) -> sys::CUstream {
    stream.0 as sys::CUstream
}

/// A 2D copy between packed host memory and rows on the device; the caller fills in the direction.
fn rows_copy(rows: Rows, host: usize) -> sys::CUDA_MEMCPY2D {
    let width = rows.width as usize;
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: 0,
        srcArray: null_mut(),
        srcPitch: width,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: 0,
        dstArray: null_mut(),
        dstPitch: width,
        WidthInBytes: width,
        Height: host / width.max(1),
    }
}

impl Driver for System {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn free_memory(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both outlive the call.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    fn memory_bandwidth(&self) -> Result<Option<u64>> {
        let clock = attribute(self.handle, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
        let bits = attribute(self.handle, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
        // The clock is in kHz, and every pin moves two bits in each cycle. Drivers that do not tell say zero.
        let bytes = 2 * 1000 * u64::from(clock) * u64::from(bits) / 8;
        Ok((bytes > 0).then_some(bytes))
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(Error::DeviceMemory {
                need: bytes,
                have: self.free_memory()?,
                device: format!("GPU {} ({})", self.device.index, self.device.name),
                ways: vec![Remedy::SmallerImage, Remedy::CloseGpuPrograms, Remedy::CpuBackend],
            }),
            status => check("cuMemAlloc", status).map(|()| address),
        }
    }

    fn free(&self, address: u64) {
        // SAFETY: came from `allocate`. A failure is an earlier fault of the context, reported where it happened.
        let _ = unsafe { sys::cuMemFree_v2(address) };
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        let mut memory = null_mut();
        // SAFETY: `memory` outlives the call.
        check("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&mut memory, bytes) })?;
        NonNull::new(memory.cast()).ok_or(Error::Memory { need: bytes as u64 })
    }

    fn free_pinned(&self, memory: NonNull<u8>) {
        // SAFETY: came from `allocate_pinned`.
        let _ = unsafe { sys::cuMemFreeHost(memory.as_ptr().cast()) };
    }

    fn load(&self, image: &[u8]) -> Result<Module> {
        // The loader reads whole words, but bytes embedded in a program have no alignment.
        let mut words = vec![0_u64; image.len().div_ceil(8)];
        words.iter_mut().zip(image.chunks(8)).for_each(|(word, bytes)| {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        });
        let mut module = null_mut();
        // SAFETY: a fat binary states its own length; the driver keeps no pointer to it.
        match unsafe { sys::cuModuleLoadData(&mut module, words.as_ptr().cast()) } {
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                let (major, minor) = self.device.capability;
                Err(no_gpu(
                    format!("this kiln has no kernels for {} (compute {major}.{minor})", self.device.name),
                    "build kiln with KILN_CUDA_ARCHS unset, or with that GPU's number in it",
                ))
            }
            status => check("cuModuleLoadData", status).map(|()| Module(module as u64)),
        }
    }

    fn unload(&self, module: Module) {
        // SAFETY: came from `load`.
        let _ = unsafe { sys::cuModuleUnload(module.0 as sys::CUmodule) };
    }

    fn function(&self, module: Module, symbol: &str, params: usize, shared: u32) -> Result<Function> {
        let bug = |what: String| Error::Op { op: "load kernels", what };
        let name = CString::new(symbol).map_err(|e| bug(e.to_string()))?;
        let (mut function, mut offset, mut size) = (null_mut(), 0, 0);
        // SAFETY: the module is loaded, and all pointers are to locals.
        unsafe {
            check("cuModuleGetFunction", sys::cuModuleGetFunction(&mut function, module.0 as sys::CUmodule, name.as_ptr()))?;
            check("cuFuncGetParamInfo", sys::cuFuncGetParamInfo(function, 0, &mut offset, &mut size))?;
        }
        if size != params {
            return Err(bug(format!("`{symbol}` takes {size} bytes, the host has {params}")));
        }
        if shared > 0 {
            let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found.
            check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, limit, shared as i32) })?;
        }
        Ok(Function(function as u64))
    }

    fn stream(&self) -> Result<Stream> {
        let mut stream = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` outlives the call.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(Stream(stream as u64))
    }

    fn destroy_stream(&self, stream: Stream) {
        // SAFETY: came from `stream`.
        let _ = unsafe { sys::cuStreamDestroy_v2(stream_of(stream)) };
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream_of(stream)) })
    }

    fn event(&self) -> Result<Event> {
        create_event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn timed_event(&self) -> Result<Event> {
        create_event(sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<Duration> {
        let mut milliseconds = 0.0;
        let (from, to) = (from.0 as sys::CUevent, to.0 as sys::CUevent);
        // SAFETY: both events are alive, and `milliseconds` outlives the call.
        check("cuEventElapsedTime", unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, from, to) })?;
        // Timestamps have a resolution of half a microsecond, so two at the same place may come out in reverse order.
        Ok(Duration::from_secs_f64(f64::from(milliseconds).max(0.0) / 1e3))
    }

    fn destroy_event(&self, event: Event) {
        // SAFETY: came from `event`. The driver keeps it until nothing waits for it any more.
        let _ = unsafe { sys::cuEventDestroy_v2(event.0 as sys::CUevent) };
    }

    fn record_event(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: event and stream are alive.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0 as sys::CUevent, stream_of(stream)) })
    }

    fn synchronize_event(&self, event: Event) -> Result<()> {
        // SAFETY: the event is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event.0 as sys::CUevent) })
    }

    fn wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: event and stream are alive.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream_of(stream), event.0 as sys::CUevent, 0) })
    }

    fn copy_in(&self, stream: Stream, to: Rows, from: &[u8]) -> Result<()> {
        let mut copy = rows_copy(to, from.len());
        copy.srcMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
        copy.srcHost = from.as_ptr().cast();
        copy.dstDevice = to.address;
        copy.dstPitch = to.pitch as usize;
        // SAFETY: the host side is `from`, whole rows of it. Memory that is not pinned is copied before the call returns. The caller keeps
        // pinned memory.
        check("copy to the GPU", unsafe {
            if to.width == from.len() as u64 {
                sys::cuMemcpyHtoDAsync_v2(to.address, copy.srcHost, from.len(), stream_of(stream))
            } else {
                sys::cuMemcpy2DAsync_v2(&copy, stream_of(stream))
            }
        })
    }

    fn copy_out(&self, stream: Stream, from: Rows, to: &mut [u8]) -> Result<()> {
        let mut copy = rows_copy(from, to.len());
        copy.srcDevice = from.address;
        copy.srcPitch = from.pitch as usize;
        copy.dstMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
        copy.dstHost = to.as_mut_ptr().cast();
        // SAFETY: the host side is `to`, whole rows of it, and the stream is synchronized before the borrow ends.
        let queued = check("copy from the GPU", unsafe {
            if from.width == to.len() as u64 {
                sys::cuMemcpyDtoHAsync_v2(copy.dstHost, from.address, to.len(), stream_of(stream))
            } else {
                sys::cuMemcpy2DAsync_v2(&copy, stream_of(stream))
            }
        });
        let done = self.synchronize(stream);
        queued.and(done)
    }

    fn fill(&self, stream: Stream, at: u64, value: u8, len: u64) -> Result<()> {
        // SAFETY: touches device memory only.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at, value, len as usize, stream_of(stream)) })
    }

    fn launch(&self, stream: Stream, launch: &Launch, params: &[u8]) -> Result<()> {
        let attribute = |id, set: fn(&mut sys::CUlaunchAttributeValue, u32), value| {
            // SAFETY: integers, enums with a zero variant and unions of such, for which all zero is a value.
            let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
            attribute.id = id;
            set(&mut attribute.value, value);
            attribute
        };
        use sys::CUlaunchAttributeID as Id;
        let cluster = attribute(
            Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            |v, n| v.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: n, y: 1, z: 1 },
            launch.cluster,
        );
        let overlap = attribute(
            Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            |v, n| v.programmaticStreamSerializationAllowed = n as i32,
            1,
        );
        let mut attributes = [overlap; 2];
        let mut count = 0;
        for wanted in [(launch.cluster > 1).then_some(cluster), launch.overlap.then_some(overlap)].into_iter().flatten() {
            attributes[count] = wanted;
            count += 1;
        }
        let [x, y, z] = launch.grid;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: stream_of(stream),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: `function` has checked that the kernel takes one parameter of this many bytes, which the driver copies before it returns.
        // The caller that filled in the addresses has checked what the kernel does with them.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&config, launch.function.0 as sys::CUfunction, arguments.as_mut_ptr(), null_mut())
        })
    }

    fn tensor_map(&self, spec: &MapSpec) -> Result<[u64; 16]> {
        use sys::CUtensorMapDataType as Type;
        let dtype = match spec.dtype {
            DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            DType::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            // Elements are copied without conversion. Outside of a matrix nothing but zero is read as a number.
            DType::U8 | DType::E4m3 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            other => return Err(Error::Op { op: "tensor map", what: format!("no map of {} elements", other.name()) }),
        };
        let swizzle = match spec.swizzle {
            Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many entries as there are dimensions (one fewer for pitches) and outlive the call.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                spec.rank(),
                spec.address as *mut c_void,
                spec.size.as_ptr(),
                spec.pitch.as_ptr(),
                spec.tile.as_ptr(),
                [1, 1, 1].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        Ok(map.opaque)
    }

    fn begin_capture(&self, stream: Stream) -> Result<()> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream_of(stream), mode) })
    }

    fn end_capture(&self, stream: Stream) -> Result<Graph> {
        let (mut graph, mut ready) = (null_mut(), null_mut());
        // SAFETY: the pointers are to locals; the graph is only needed to instantiate the executable one.
        unsafe {
            check("cuStreamEndCapture", sys::cuStreamEndCapture(stream_of(stream), &mut graph))?;
            let made = check("cuGraphInstantiate", sys::cuGraphInstantiateWithFlags(&mut ready, graph, 0));
            let _ = sys::cuGraphDestroy(graph);
            made?;
        }
        Ok(Graph(ready as u64))
    }

    fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<()> {
        // SAFETY: the graph came from `end_capture`, and the memory it refers to is still allocated: graphs are destroyed first.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.0 as sys::CUgraphExec, stream_of(stream)) })
    }

    fn destroy_graph(&self, graph: Graph) {
        // SAFETY: came from `end_capture`.
        let _ = unsafe { sys::cuGraphExecDestroy(graph.0 as sys::CUgraphExec) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_the_first_number_with_points() {
        for (text, want) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep\nGCC version:  gcc version 12.3.0",
                Some("580.159.04"),
            ),
            ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.64  Release Build", Some("575.64")),
            ("no release. here .", None),
            ("", None),
        ] {
            assert_eq!(release_in(text).as_deref(), want, "{text}");
        }
    }
}
