// Replays a tape: calls the dispatcher's kernels one after the other, below autograd and without Python.
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

namespace {

struct Step {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  std::vector<std::optional<at::Tensor>> places;  // where to copy results; empty if the kernel writes them itself
};

// A Python number where the schema wants a tensor takes part in type promotion as a number does.
c10::IValue to_argument(py::handle value, const c10::TypePtr& type) {
  const bool is_float = PyFloat_Check(value.ptr());
  if (type->kind() == c10::TypeKind::TensorType && (is_float || PyLong_Check(value.ptr()))) {
    at::Tensor wrapped =
        is_float ? at::scalar_to_tensor(value.cast<double>()) : at::scalar_to_tensor(value.cast<int64_t>());
    wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
    return wrapped;
  }
  return torch::jit::toIValue(value, type);
}

void append_tensors(const c10::IValue& value, std::vector<at::Tensor>& found) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) found.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(tensor);
  }
}

class Tape {
 public:
  void add(const std::string& name, const std::string& overload, const py::tuple& args, const py::dict& kwargs,
           const py::list& places) {
    Step step{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), {}, {}};
    const auto& declared = step.op.schema().arguments();
    for (size_t i = 0; i < declared.size(); ++i) {
      const auto& argument = declared[i];
      const auto& type = argument.real_type();
      if (i < args.size() && !argument.kwarg_only()) {
        step.arguments.push_back(to_argument(args[i], type));
      } else if (kwargs.contains(argument.name().c_str())) {
        step.arguments.push_back(to_argument(kwargs[argument.name().c_str()], type));
      } else {
        step.arguments.push_back(argument.default_value().value_or(c10::IValue()));
      }
    }
    for (const auto& place : places) {
      step.places.push_back(place.is_none() ? std::nullopt : std::make_optional(place.cast<at::Tensor>()));
    }
    steps_.push_back(std::move(step));
  }

  void replay() const {
    py::gil_scoped_release without_python;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<c10::IValue> stack;
    std::vector<at::Tensor> results;
    for (const Step& step : steps_) {
      stack = step.arguments;
      step.op.callBoxed(&stack);
      if (step.places.empty()) continue;
      results.clear();
      for (const auto& value : stack) append_tensors(value, results);
      TORCH_CHECK(results.size() == step.places.size(), step.op.schema().name(), " gave another number of results");
      for (size_t i = 0; i < results.size(); ++i) {
        if (step.places[i]) step.places[i]->copy_(results[i]);
      }
    }
  }

 private:
  std::vector<Step> steps_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Tape>(module, "Tape").def(py::init<>()).def("add", &Tape::add).def("replay", &Tape::replay);
}
